-- held: what a holder has of one queue, as far as the page reaches.
-- KEYS: root of one queue   ARGV: 1 group, 2 holder, 3 page, 4... steps
-- Returns: {step, id, count, ...}
local out = {}
for s = 4, #ARGV do
  local stream = KEYS[1] .. ':s:' .. ARGV[s]
  if redis.call('EXISTS', stream) == 1 then
    local p = redis.pcall('XPENDING', stream, ARGV[1], '-', '+', ARGV[3], ARGV[2])
    if not p.err then
      for _, row in ipairs(p) do
        out[#out + 1] = ARGV[s]
        out[#out + 1] = row[1]
        out[#out + 1] = row[4]
      end
    end
  end
end
return out
