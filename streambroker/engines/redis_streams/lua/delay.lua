-- delay: store messages that wait for their time, once each even when the call is repeated.
-- KEYS: 1 delay set, 2 bell, 3 producer's last sequence
-- ARGV: 1 sequence of the first message, then for each: delay in ms, member (id \n nonce \n step \n count \n message)
-- Returns: how many were added.
-- Crash: as publish. The due time is the server's clock plus the delay, so a publisher's clock does not matter.
local first = tonumber(ARGV[1])
local last = tonumber(redis.call('GET', KEYS[3]) or '0')
local t = redis.call('TIME')
local now = t[1] * 1000 + t[2] / 1000
local added, earliest = 0, false
for i = 2, #ARGV, 2 do
  if first + (i - 2) / 2 > last then
    redis.call('ZADD', KEYS[1], string.format('%.0f', math.ceil(now + ARGV[i])), ARGV[i + 1])
    if redis.call('ZRANK', KEYS[1], ARGV[i + 1]) == 0 then earliest = true end
    added = added + 1
  end
end
if added > 0 then
  redis.call('SET', KEYS[3], string.format('%.0f', first + (#ARGV - 1) / 2 - 1), 'PX', 300000)
  -- an idle consumer waits until the due time that it knows: tell one of an earlier one
  if earliest and redis.call('LLEN', KEYS[2]) < 1 then redis.call('RPUSH', KEYS[2], '1') end
end
return added
