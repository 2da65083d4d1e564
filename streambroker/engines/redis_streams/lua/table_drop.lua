-- table_drop: remove all rows that a transient queue owns.
-- KEYS: 1 rows owned by it, 2 timers       ARGV: 1 queue, 2 start of the tables' keys
-- Returns: how many rows went.   Crash: all or nothing.
local n = 0
for _, row in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local name, key = string.match(row, '^([^\n]*)\n(.*)$')
  if name and redis.call('HDEL', ARGV[2] .. 't:' .. name, key) > 0 then
    n = n + 1
    if redis.call('EXISTS', ARGV[2] .. 't:' .. name) == 0 then
      redis.call('DEL', ARGV[2] .. 'v:' .. name)
    else
      local t = redis.call('TIME')
      redis.call('SET', ARGV[2] .. 'v:' .. name, t[1] .. '.' .. t[2])
    end
  end
end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], 'q\n' .. ARGV[1])
return n
