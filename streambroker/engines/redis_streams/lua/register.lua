-- register: make a holder known, or change what is known of it.
-- KEYS: 1 workers, 2 sign of life        ARGV: 1 holder, 2 info (JSON), 3 lease in ms, 4 channel of all workers
-- Returns: 1.   Crash: known or not; a process takes messages only after the answer.
if redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) == 1 then redis.call('PUBLISH', ARGV[4], ARGV[1]) end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[3])
return 1
