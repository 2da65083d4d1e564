-- (part) Moves due messages of a queue into their streams, one page; every message in one step.
local function promote_page(root, now, page)
  local delay = root .. ':delay'
  local due = redis.call('ZRANGEBYSCORE', delay, '-inf', string.format('%.0f', now), 'LIMIT', 0, page)
  for _, member in ipairs(due) do
    local _, stop, nonce, step, count, expiry = string.find(member, '^[^\n]*\n([^\n]*)\n(%d+)\n(%d+)\n(%d+)\n')
    if step then
      local words = {root .. ':s:' .. step, '*', 'm', string.sub(member, stop + 1)}
      if expiry ~= '0' then
        words[#words + 1] = 'x'
        words[#words + 1] = expiry
      end
      if count ~= '0' then
        words[#words + 1] = 'c'
        words[#words + 1] = count
        words[#words + 1] = 'f'
        words[#words + 1] = string.match(nonce, '^%d+')
      end
      redis.call('XADD', unpack(words))
    else
      redis.call('XADD', root .. ':s:0', '*', 'foreign', member)
    end
    redis.call('ZREM', delay, member)
  end
  return #due
end

local function next_due(root, now)
  local head = redis.call('ZRANGE', root .. ':delay', 0, 0, 'WITHSCORES')
  if head[2] then return math.max(0, tonumber(head[2]) - now) end
  return -1
end

local function clock()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
