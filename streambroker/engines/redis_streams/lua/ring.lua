-- ring: wake an idle consumer of a queue: another one was woken that has no room now, or does not wait any more.
-- KEYS: root       ARGV: 1 only if this holder was declared dead (or empty: in any case), 2... steps
-- Returns: 1 when it rang.   Crash: rung or not; the next idle consumer looks at its own time.
local root, there = KEYS[1], false
if ARGV[1] ~= '' and redis.call('EXISTS', root .. ':gone:' .. ARGV[1]) == 0 then return 0 end
for s = 2, #ARGV do there = there or redis.call('EXISTS', root .. ':s:' .. ARGV[s]) == 1 end
if not there or redis.call('LLEN', root .. ':bell') > 0 then return 0 end
redis.pcall('RPUSH', root .. ':bell', '1')
local ttl = redis.call('PTTL', root .. ':s:' .. ARGV[2])
if ttl > 0 then redis.call('PEXPIRE', root .. ':bell', ttl) end
return 1
