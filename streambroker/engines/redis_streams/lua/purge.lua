-- purge: remove ready and delayed messages of one queue, one page; never unsettled ones.
-- KEYS: root   ARGV: 1 group, 2 page, 3... steps
-- Returns: {removed, more 0/1}.   Crash: what is removed is removed; call again.
local root, group, page = KEYS[1], ARGV[1], tonumber(ARGV[2])
local n = 0
for s = 3, #ARGV do
  local stream = root .. ':s:' .. ARGV[s]
  if redis.call('EXISTS', stream) == 1 and n < page then
    local read = '-'
    for _, g in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
      local f = {}
      for j = 1, #g, 2 do f[g[j]] = g[j + 1] end
      if f['name'] == group then read = '(' .. f['last-delivered-id'] end
    end
    for _, e in ipairs(redis.call('XRANGE', stream, read, '+', 'COUNT', page - n)) do
      n = n + redis.call('XDEL', stream, e[1])
    end
    for _, who in ipairs({'~free', '~last'}) do
      local p = redis.pcall('XPENDING', stream, group, '-', '+', page, who)
      if not p.err then
        for _, row in ipairs(p) do
          redis.call('XACK', stream, group, row[1])
          n = n + redis.call('XDEL', stream, row[1])
        end
      end
    end
  end
end
if n < page then n = n + redis.call('ZREMRANGEBYRANK', root .. ':delay', 0, page - n - 1) end
return {n, n >= page and 1 or 0}
