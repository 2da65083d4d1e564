-- declare: a transient queue buffers from here on, until its time is over; a durable one has no time.
-- KEYS: 1 stream of the first step, 2 root     ARGV: 1 group, 2 expiry in ms or 0 (durable), 3... steps
-- Returns: 1 when it was made.   Crash: made or not; declaring again is harmless.
local made = 0
local ms = tonumber(ARGV[2])
if ms > 0 and redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
  made = 1
end
local keys = {KEYS[2] .. ':bell', KEYS[2] .. ':back', KEYS[2] .. ':delay'}
for s = 3, #ARGV do keys[#keys + 1] = KEYS[2] .. ':s:' .. ARGV[s] end
for _, key in ipairs(keys) do
  if ms > 0 then redis.call('PEXPIRE', key, ms) else redis.call('PERSIST', key) end
end
return made
