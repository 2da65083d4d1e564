-- table_write: change rows of a shared table; the version moves only when something changed.
-- KEYS: 1 rows, 2 version, 3 rows owned by a transient queue (or the table's own key when there is none)
-- ARGV: 1 put | delete, 2 name of the table, then key, value (put) or keys (delete)
-- Returns: how many rows changed.   Crash: all or nothing.
-- Versions are times: a table that was lost and begins again never repeats one.
local n = 0
if ARGV[1] == 'put' then
  if redis.call('HGET', KEYS[1], ARGV[3]) ~= ARGV[4] then
    redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
    n = 1
  end
  if KEYS[3] ~= KEYS[1] then redis.call('SADD', KEYS[3], ARGV[2] .. '\n' .. ARGV[3]) end
else
  for i = 3, #ARGV do n = n + redis.call('HDEL', KEYS[1], ARGV[i]) end
end
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('DEL', KEYS[2])
elseif n > 0 then
  local t = redis.call('TIME')
  redis.call('SET', KEYS[2], t[1] .. '.' .. t[2])
end
return n
