-- dead_expire: delete dead letters that are too old, and the key when none is left.
-- KEYS: 1 dead letters      ARGV: 1 oldest age in ms      Returns: how many there were.   Crash: all or nothing.
local t = redis.call('TIME')
local oldest = t[1] * 1000 + math.floor(t[2] / 1000) - ARGV[1]
local n = redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f', math.max(0, oldest)))
if n > 0 and redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1]) end
return n
