-- adopt: move deliveries that a process still owns under its old name to its new one, after it was declared gone.
-- KEYS: 1 stream      ARGV: 1 group, 2 old holder, 3 new holder, 4... ids
-- Returns: the ids that were still its own.
-- Crash: an entry is under one of the two names.
local own = {}
for i = 4, #ARGV do
  local p = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if not p.err and p[1] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, ARGV[i], 'RETRYCOUNT', p[1][4], 'JUSTID')
    own[#own + 1] = ARGV[i]
  end
end
return own
