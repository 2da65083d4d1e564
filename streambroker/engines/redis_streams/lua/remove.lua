-- remove: delete a queue's keys, its dead letters excepted.
-- KEYS: root   ARGV: 1 group, 2 only if empty 0/1, 3... steps
-- Returns: how many messages (ready and delayed) went, or -1.   Crash: all or nothing.
local root, n, unsettled = KEYS[1], 0, 0
local streams = {}
for s = 3, #ARGV do
  local stream = root .. ':s:' .. ARGV[s]
  streams[#streams + 1] = stream
  if redis.call('EXISTS', stream) == 1 then
    n = n + redis.call('XLEN', stream)
    local p = redis.pcall('XPENDING', stream, ARGV[1])
    if not p.err then
      n = n - tonumber(p[1])
      for _, row in ipairs(type(p[4]) == 'table' and p[4] or {}) do
        if row[1] == '~free' or row[1] == '~last' then n = n + tonumber(row[2]) end
      end
    end
  end
end
n = n + redis.call('ZCARD', root .. ':delay')
if ARGV[2] == '1' and n > 0 then return -1 end
for _, stream in ipairs(streams) do redis.call('DEL', stream) end
redis.call('DEL', root .. ':bell', root .. ':delay', root .. ':back', root .. ':trial')
return n
