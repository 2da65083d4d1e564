-- unregister: a clean goodbye, after everything was handed back.
-- KEYS: 1 workers, 2 sign of life, 3 first seen gone, 4 server identity, 5 gate        ARGV: 1 holder
-- Returns: 1 when it was known.
redis.call('DEL', KEYS[2])
redis.call('HDEL', KEYS[3], ARGV[1])
local n = redis.call('HDEL', KEYS[1], ARGV[1])
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('DEL', KEYS[4], KEYS[5]) end
return n
