-- forget: a gone holder has been reclaimed everywhere.
-- KEYS: 1 gone holders, 2 timers      ARGV: 1 holder      Returns: 1 when it was there.
redis.call('ZREM', KEYS[2], 'h\n' .. ARGV[1])
return redis.call('HDEL', KEYS[1], ARGV[1])
