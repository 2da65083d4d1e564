-- dead_expire: delete a page of the dead letters that are too old, and the key when none is left.
-- KEYS: 1 dead letters      ARGV: 1 oldest age in ms, 2 page      Returns: how many there were; fewer than a page: all.
-- Crash: all of the page or nothing; the rest is found again.
local t = redis.call('TIME')
local oldest = t[1] * 1000 + math.floor(t[2] / 1000) - ARGV[1]
local ids = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', string.format('(%.0f-0', math.max(1, oldest)), 'COUNT', ARGV[2])) do
  ids[#ids + 1] = entry[1]
end
if #ids > 0 then redis.call('XDEL', KEYS[1], unpack(ids)) end
if #ids > 0 and redis.call('XLEN', KEYS[1]) == 0 then redis.call('DEL', KEYS[1]) end
return #ids
