-- delay: store messages that wait for their time, once each even when the call is repeated.
-- KEYS: 1 delay set, 2 bell, 3 producer's last sequence, 4 stream of the first step
-- ARGV: 1 sequence of the first message, 2 create (1, or 0: only for a queue that is there), then for each message:
--       delay in ms, expiry in ms or '', its beginning (id \n nonce \n step \n count \n), message
-- Returns: {fresh, added}: fresh 1 when nothing else of the queue waits, -1 when it is not there and create is 0.
-- Crash: as publish. The due time is the server's clock plus the delay, so a publisher's clock does not matter.
if ARGV[2] == '0' and redis.call('EXISTS', KEYS[4]) == 0 then return {-1, 0} end
local first = tonumber(ARGV[1])
local last = tonumber(redis.call('GET', KEYS[3]) or '0')
local t = redis.call('TIME')
local now = t[1] * 1000 + t[2] / 1000
local fresh = redis.call('EXISTS', KEYS[1]) == 0 and 1 or 0
local added, earliest, number = 0, false, first
for i = 3, #ARGV, 4 do
  if number > last then
    local expiry = ARGV[i + 1] == '' and '0' or string.format('%.0f', now + ARGV[i + 1])
    local member = ARGV[i + 2] .. expiry .. '\n' .. ARGV[i + 3]
    redis.call('ZADD', KEYS[1], string.format('%.0f', math.ceil(now + ARGV[i])), member)
    if redis.call('ZRANK', KEYS[1], member) == 0 then earliest = true end
    added = added + 1
  end
  number = number + 1
end
if added > 0 then
  redis.call('SET', KEYS[3], string.format('%.0f', number - 1), 'PX', 300000)
  -- an idle consumer waits until the due time that it knows: tell one of an earlier one
  if earliest and redis.call('LLEN', KEYS[2]) < 1 then redis.call('RPUSH', KEYS[2], '1') end
  local ttl = redis.call('PTTL', KEYS[4])
  if ttl > 0 then
    redis.call('PEXPIRE', KEYS[1], ttl)
    redis.call('PEXPIRE', KEYS[2], ttl)
  end
end
return {fresh, added}
