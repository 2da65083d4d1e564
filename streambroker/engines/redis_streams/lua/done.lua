-- done: acknowledge and delete; whoever has them, since the work is done.
-- KEYS: 1 stream, 2 trials of the queue, 3 bell     ARGV: 1 group, 2 holder, 3... ids
-- Returns: how many were pending.
-- Crash: before it they are redelivered when the holder is gone; after it they are gone for good. Repeating is harmless.
local n = redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 3))
redis.call('XDEL', KEYS[1], unpack(ARGV, 3))
local trial = redis.call('HGET', KEYS[2], ARGV[2])
if trial then
  -- what was kept from this holder because of its trial may come now
  local step, id = string.match(trial, '^(%d+)|([^|]+)|')
  for i = 3, step and #ARGV or 0 do
    if ARGV[i] == id and string.sub(KEYS[1], -#step - 1) == ':' .. step then redis.call('HDEL', KEYS[2], ARGV[2]) end
  end
  if redis.call('LLEN', KEYS[3]) < 1 then redis.pcall('RPUSH', KEYS[3], '1') end
end
return n
