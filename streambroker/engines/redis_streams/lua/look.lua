-- look: renew the own lease; then, one process at a time, see which other holders are gone.
-- KEYS: 1 workers, 2 own sign of life, 3 first seen gone, 4 gone holders (to be reclaimed), 5 gate, 6 server identity,
--       7 timers: transient queues by their expiry ('q\n' and the name), gone holders by their next try ('h\n' ...)
-- ARGV: 1 holder, 2 lease ms, 3 proof of death 0/1, 4 start of alive channels, 5 start of sign-of-life keys,
--       6 grace ms after a restart or failover, 7 ms between the two looks, 8 channel of all workers
-- Returns: {1 known | 0 not known any more, other workers, {gone holder, info, ...}, {expired transient queue, ...},
--   whether the server still has the own subscription 0/1}
-- A holder is gone when two looks, some time apart, both find its lease run out, or its connection closed and no sign of
-- life in between. The verdict removes it from the workers in the same step: a process that was only silent learns at
-- its next look that it is not known any more. After a restart or a failover nobody is subscribed yet and leases may
-- have run out while the server was away, so nobody is judged before the grace is over.
-- Times that lie too far ahead are from before the server's clock was put back: they count from now on.
-- Crash: before it nothing; after it the verdict stands and the next look of anyone hands the gone holder out again.
local me, lease, apart = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[7])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if not redis.call('HGET', KEYS[1], me) then return {0, 0, {}, {}, 0} end
-- PEXPIRE is allowed when memory is full, SET is not
if redis.call('PEXPIRE', KEYS[2], lease) == 0 then redis.pcall('SET', KEYS[2], lease, 'PX', lease) end

-- whether it is missed: gone for this look, and not yet proved
local function judge(w, info)
  local life = ARGV[5] .. w
  local left, whole = redis.call('PTTL', life), tonumber(redis.call('GET', life) or nil)
  local over = left < 0
  if whole and left > whole then
    redis.call('PEXPIRE', life, whole)
    left = whole
  end
  local cut = ARGV[3] == '1' and redis.call('PUBSUB', 'NUMSUB', ARGV[4] .. w)[2] == 0
  -- a closed connection proves nothing before the time in which a living worker is back, whatever the looker's lease
  local enough = over and apart or math.max(apart, 1950)
  local silent = over or (whole or left) - left >= enough
  local since = tonumber(redis.call('HGET', KEYS[3], w) or nil)
  if not over and not cut then
    if since then redis.call('HDEL', KEYS[3], w) end
  elseif not since or since > now or now - since > 10000 then
    -- none, or one that nobody has looked after since: not from the look before
    redis.pcall('HSET', KEYS[3], w, string.format('%.0f', now))
    return true
  elseif silent and now - since >= enough then
    redis.call('HDEL', KEYS[1], w)
    redis.call('HDEL', KEYS[3], w)
    redis.call('DEL', life)
    redis.pcall('HSET', KEYS[4], w, info)
    redis.pcall('ZADD', KEYS[7], 0, 'h\n' .. w)
  else
    return true
  end
end

local others = redis.call('HLEN', KEYS[1]) - 1
if others > 0 then
  if redis.call('PTTL', KEYS[5]) > 2000 then redis.call('DEL', KEYS[5]) end
  local gate = redis.pcall('SET', KEYS[5], me, 'NX', 'PX', math.floor(apart * 0.7))
  if gate and not gate.err then
    local identity = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)') or ''
    local server = redis.call('HMGET', KEYS[6], 'id', 'since')
    if server[1] ~= identity or (tonumber(server[2]) or 0) > now then
      server[2] = server[1] and now or 0
      redis.pcall('HSET', KEYS[6], 'id', identity, 'since', string.format('%.0f', server[2]))
      redis.call('DEL', KEYS[3])
    end
    local missed = false
    if now - server[2] >= tonumber(ARGV[6]) then
      local workers = redis.call('HGETALL', KEYS[1])
      for i = 1, #workers, 2 do
        if workers[i] ~= me and judge(workers[i], workers[i + 1]) then missed = true end
      end
    end
    -- whoever hears it puts its own look off
    redis.call('PUBLISH', ARGV[8], missed and 'suspect' or 'all well')
  end
end

local gone, expired = {}, {}
for _, timer in ipairs(redis.call('ZRANGEBYSCORE', KEYS[7], '-inf', string.format('%.0f', now), 'LIMIT', 0, 50)) do
  local name = string.sub(timer, 3)
  if string.sub(timer, 1, 2) == 'q\n' then
    expired[#expired + 1] = name
  else
    -- whoever looks next gets it again if its reclaimer does not finish within some seconds
    gone[#gone + 1] = name
    gone[#gone + 1] = redis.call('HGET', KEYS[4], name) or ''
    redis.pcall('ZADD', KEYS[7], string.format('%.0f', now + 5000), timer)
  end
end
-- a connection that was dropped in between ends for the server alone
local heard = ARGV[3] == '0' or redis.call('PUBSUB', 'NUMSUB', ARGV[4] .. me)[2] > 0
return {1, others, gone, expired, heard and 1 or 0}
