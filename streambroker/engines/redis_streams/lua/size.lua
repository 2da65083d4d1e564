-- size: counts of one queue.
-- KEYS: root   ARGV: 1 group, 2 message TTL in ms or 0, 3... steps
-- Returns: {ready, in flight, delayed, dead, ms of the oldest ready entry or -1, holder, count, ...}
-- XLEN minus pending is right on every version since done deletes; the group's own lag is not.
-- A queue with a message TTL first loses its expired ready messages.
local root, group, ttl = KEYS[1], ARGV[1], tonumber(ARGV[2])
local ready, flight, oldest = 0, 0, -1
local holders = {}
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for s = 3, #ARGV do
  local stream = root .. ':s:' .. ARGV[s]
  if redis.call('EXISTS', stream) == 1 then
    local read, waiting, first = '-', 0, nil
    local p = redis.pcall('XPENDING', stream, group)
    if not p.err then
      for _, g in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
        local f = {}
        for j = 1, #g, 2 do f[g[j]] = g[j + 1] end
        if f['name'] == group then read = '(' .. f['last-delivered-id'] end
      end
      for _, row in ipairs(type(p[4]) == 'table' and p[4] or {}) do
        if row[1] == '~free' or row[1] == '~last' then
          waiting = waiting + tonumber(row[2])
          local w = redis.call('XPENDING', stream, group, '-', '+', 1, row[1])[1]
          local ms = w and tonumber(string.match(w[1], '^%d+'))
          if ms and (not first or ms < first) then first = ms end
        else
          flight = flight + tonumber(row[2])
          holders[#holders + 1] = row[1]
          holders[#holders + 1] = tonumber(row[2])
        end
      end
    end
    if ttl > 0 then
      local old = redis.call('XRANGE', stream, read, string.format('%.0f', now - ttl), 'COUNT', 1000)
      for _, e in ipairs(old) do redis.call('XDEL', stream, e[1]) end
    end
    local new = redis.call('XRANGE', stream, read, '+', 'COUNT', 1)[1]
    if new then
      local ms = tonumber(string.match(new[1], '^%d+'))
      if not first or ms < first then first = ms end
    end
    local total = p.err and 0 or tonumber(p[1])
    ready = ready + redis.call('XLEN', stream) - total + waiting
    if first and (oldest < 0 or now - first > oldest) then oldest = math.max(0, now - first) end
  end
end
-- due and not yet moved, since nobody has asked for messages: whoever asks gets them
local delay = root .. ':delay'
local due = redis.call('ZCOUNT', delay, '-inf', string.format('%.0f', now))
if due > 0 then
  oldest = math.max(oldest, now - tonumber(redis.call('ZRANGE', delay, 0, 0, 'WITHSCORES')[2]))
end
local out = {ready + due, flight, redis.call('ZCARD', delay) - due, redis.call('XLEN', root .. ':dead'), oldest}
for i = 1, #holders do out[#out + 1] = holders[i] end
return out
