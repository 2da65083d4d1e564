-- unregister: a clean goodbye, after everything was handed back.
-- KEYS: 1 workers, 2 sign of life, 3 first seen gone        ARGV: 1 holder
-- Returns: 1 when it was known.
redis.call('DEL', KEYS[2])
redis.call('HDEL', KEYS[3], ARGV[1])
return redis.call('HDEL', KEYS[1], ARGV[1])
