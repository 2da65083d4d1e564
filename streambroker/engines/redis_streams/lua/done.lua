-- done: acknowledge and delete; whoever has them, since the work is done.
-- KEYS: 1 stream, 2 trials of the queue, 3 bell     ARGV: 1 group, 2 holder, 3... ids
-- Returns: how many were pending.
-- Crash: before it they are redelivered when the holder is gone; after it they are gone for good. Repeating is harmless.
local n = redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 3))
redis.call('XDEL', KEYS[1], unpack(ARGV, 3))
local marks = redis.call('HMGET', KEYS[2], ARGV[2], ARGV[2] .. ' long')
local step = string.match(KEYS[1], ':(%d+)$')
local function ended(mark)
  local where, id = string.match(mark, '^(%d+)|([^|]+)')
  for i = 3, where == step and #ARGV or 0 do
    if ARGV[i] == id then return true end
  end
  return false
end
if marks[1] then
  -- what was kept from this holder because of its trial may come now
  if ended(marks[1]) then redis.call('HDEL', KEYS[2], ARGV[2]) end
  if redis.call('LLEN', KEYS[3]) < 1 then redis.pcall('RPUSH', KEYS[3], '1') end
end
if marks[2] and ended(marks[2]) then redis.call('HDEL', KEYS[2], ARGV[2] .. ' long') end
return n
