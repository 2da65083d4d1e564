-- (part) Moves due messages of a queue into their streams, one page; every message in one step.
local function promote_page(root, now, page)
  local delay = root .. ':delay'
  local due = redis.call('ZRANGEBYSCORE', delay, '-inf', string.format('%.0f', now), 'WITHSCORES', 'LIMIT', 0, page)
  for i = 1, #due, 2 do
    local member, score = due[i], due[i + 1]
    local words = {root .. ':s:0', '*', 'foreign', member}
    local _, stop, nonce, step, count, expiry = string.find(member, '^[^\n]*\n([^\n]*)\n(%d+)\n(%d+)\n(%d+)\n')
    if step then
      words = {root .. ':s:' .. step, '*', 'm', string.sub(member, stop + 1)}
      if expiry ~= '0' then
        words[#words + 1] = 'x'
        words[#words + 1] = expiry
      end
      if count ~= '0' then
        words[#words + 1] = 'c'
        words[#words + 1] = count
        words[#words + 1] = 'f'
        words[#words + 1] = string.match(nonce, '^%d+') or string.format('%.0f', now)
      end
      if string.find(nonce, '-r', -2, true) then
        words[#words + 1] = 'r'
        words[#words + 1] = '1'
      end
    end
    -- the removal comes first: after it the move is allowed when memory is full, which it does not need more of
    redis.call('ZREM', delay, member)
    local added = redis.pcall('XADD', unpack(words))
    if type(added) == 'table' and added.err then
      redis.call('ZADD', delay, score, member)
      error(added.err, 0)
    end
  end
  return #due / 2
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
