-- held: what a holder has of some queues, as far as the page reaches.
-- KEYS: roots of the queues (in a cluster one, and a guard)   ARGV: 1 group, 2 holder, 3 page, 4... steps
-- Returns: {queue number, step, id, count, ...}
local out = {}
for q = 1, #KEYS do
  for s = 4, #ARGV do
    local stream = KEYS[q] .. ':s:' .. ARGV[s]
    if redis.call('EXISTS', stream) == 1 then
      local p = redis.pcall('XPENDING', stream, ARGV[1], '-', '+', ARGV[3], ARGV[2])
      if not p.err then
        for _, row in ipairs(p) do
          out[#out + 1] = q
          out[#out + 1] = ARGV[s]
          out[#out + 1] = row[1]
          out[#out + 1] = row[4]
        end
      end
    end
  end
end
return out
