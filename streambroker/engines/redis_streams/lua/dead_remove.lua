-- dead_remove: delete dead letters, and the key when none is left.
-- KEYS: 1 dead letters      ARGV: ids      Returns: how many there were.   Crash: all or nothing.
local n = redis.call('XDEL', KEYS[1], unpack(ARGV))
if redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1]) end
return n
