-- promote: move due messages into their streams, at most a page, and wake a consumer.
-- KEYS: root of one queue       ARGV: 1 page
-- Returns: {moved, ms until the next one is due or -1}
-- Crash: a message is in the delay set or in its stream, never in both or none.
-- include promote_page
local now = clock()
local moved = promote_page(KEYS[1], now, tonumber(ARGV[1]))
if moved > 0 and redis.call('LLEN', KEYS[1] .. ':bell') < 1 then redis.call('RPUSH', KEYS[1] .. ':bell', '1') end
return {moved, next_due(KEYS[1], now)}
