-- publish: append messages of one priority step, once each even when the call is repeated.
-- KEYS: 1 stream, 2 bell, 3 producer's last sequence, 4 stream of the first step
-- ARGV: 1 sequence of the first message, 2 create (1, or 0: only into a queue that is there), 3 expiry in ms or '',
--       4 greatest number of ready messages or 0, 5 group, 6... messages
-- Returns: {fresh, id...}: fresh 1 when the stream was made, -1 when it is not there and create is 0; '' as the id of a
-- message that an earlier call has stored.
-- Crash: before it nothing is stored; after it all are, and a repeat with the same sequence changes nothing.
local first, count = tonumber(ARGV[1]), #ARGV - 5
-- one command tells the last sequence and stores the new one; a repeat puts it back
local new = count == 1 and ARGV[1] or string.format('%.0f', first + count - 1)
local last = tonumber(redis.call('SET', KEYS[3], new, 'PX', 300000, 'GET') or '0')
if last >= first + count then redis.call('SET', KEYS[3], string.format('%.0f', last), 'PX', 300000) end
local expiry
if ARGV[3] ~= '' then
  local t = redis.call('TIME')
  expiry = string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[3])
end
local out, added = {0}, 0
for i = 6, #ARGV do
  if first + i - 6 > last then
    local words = {KEYS[1], 'NOMKSTREAM', '*', 'm', ARGV[i]}
    if expiry then
      words[6] = 'x'
      words[7] = expiry
    end
    local id = redis.call('XADD', unpack(words))
    if not id then
      if ARGV[2] == '0' and redis.call('EXISTS', KEYS[4]) == 0 then
        redis.call('DEL', KEYS[3])
        return {-1}
      end
      table.remove(words, 2)
      id = redis.call('XADD', unpack(words))
      out[1] = 1
      local ttl = redis.call('PTTL', KEYS[4])
      if ttl > 0 then redis.call('PEXPIRE', KEYS[1], ttl) end
    end
    out[#out + 1] = id
    added = added + 1
  else
    out[#out + 1] = ''
  end
end
if added > 0 then
  if redis.call('LLEN', KEYS[2]) < 1 then
    redis.call('RPUSH', KEYS[2], '1')
    local ttl = redis.call('PTTL', KEYS[1])
    if ttl > 0 then redis.call('PEXPIRE', KEYS[2], ttl) end
  end
  local most = tonumber(ARGV[4])
  if most > 0 then
    local pending = redis.pcall('XPENDING', KEYS[1], ARGV[5])
    local read = '-'
    local over = redis.call('XLEN', KEYS[1]) - most
    if not pending.err then
      over = over - pending[1]
      for _, g in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
        local f = {}
        for j = 1, #g, 2 do f[g[j]] = g[j + 1] end
        if f['name'] == ARGV[5] then read = '(' .. f['last-delivered-id'] end
      end
    end
    if over > 0 then
      for _, e in ipairs(redis.call('XRANGE', KEYS[1], read, '+', 'COUNT', over)) do redis.call('XDEL', KEYS[1], e[1]) end
    end
  end
end
return out
