-- done: acknowledge and delete; whoever has them, since the work is done.
-- KEYS: 1 stream, 2 trials of the queue     ARGV: 1 group, 2 holder, 3... ids
-- Returns: how many were pending.
-- Crash: before it they are redelivered when the holder is gone; after it they are gone for good. Repeating is harmless.
local n = redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 3))
redis.call('XDEL', KEYS[1], unpack(ARGV, 3))
if redis.call('EXISTS', KEYS[2]) == 1 then
  local trial = redis.call('HGET', KEYS[2], ARGV[2])
  if trial then
    local step, id = string.match(trial, '^(%d+)|([^|]+)|')
    for i = 3, #ARGV do
      if ARGV[i] == id and string.sub(KEYS[1], -#step - 1) == ':' .. step then redis.call('HDEL', KEYS[2], ARGV[2]) end
    end
  end
end
return n
