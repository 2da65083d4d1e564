-- settle: give up or give back deliveries that the holder still owns; others are left alone.
-- KEYS: root of one queue
-- ARGV: 1 group, 2 holder, 3 mode: back (uncounted) | nack (counted) | later (counted, after a delay) | dead |
--       lost (counted, but it convicts nobody),
--       4 delivery limit or 0, 5 reason (dead), or delay in ms (later), 6 dead letters kept, 7 their age in ms,
--       8 message in place of the one that dies, or empty, then step, id pairs
-- Returns: {settled, buried}
-- Crash: each message is where it was or where it should go, never in both or none.
-- include promote_page
-- include suspect
-- include bury
local root, group, me, mode, limit = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local now, settled, buried, returned = clock(), 0, 0, 0
local marks = redis.call('HMGET', root .. ':trial', me, me .. ' long')
local trial, long, freed = marks[1], marks[2], false
for i = 9, #ARGV, 2 do
  local step, id = ARGV[i], ARGV[i + 1]
  local stream = root .. ':s:' .. step
  local p = redis.pcall('XPENDING', stream, group, id, id, 1, me)
  if not p.err and p[1] then
    local count = p[1][4]
    settled = settled + 1
    if trial and string.find(trial, step .. '|' .. id .. '|', 1, true) == 1 then
      redis.call('HDEL', root .. ':trial', me)
    end
    if long == step .. '|' .. id then redis.call('HDEL', root .. ':trial', me .. ' long') end
    freed = freed or trial
    if mode == 'dead' then
      bury(root, group, step, id, count, ARGV[5], me, ARGV[6], ARGV[7], now, ARGV[8])
      buried = buried + 1
    elseif (mode == 'nack' or mode == 'later') and limit > 0 and count >= limit then
      bury(root, group, step, id, count, 'delivery limit of ' .. limit .. ' reached: rejected with requeue', me,
           ARGV[6], ARGV[7], now)
      buried = buried + 1
    elseif mode == 'later' then
      local e = redis.call('XRANGE', stream, id, id)[1]
      if e and e[2][1] == 'm' then
        local expiry = '0'
        local first, replayed = id, ''
        for j = 3, #e[2], 2 do
          if e[2][j] == 'x' then expiry = e[2][j + 1] end
          if e[2][j] == 'f' then first = e[2][j + 1] .. '-' .. id end
          if e[2][j] == 'r' then replayed = '-r' end
        end
        -- the id stays empty: a revoke drops jobs that wait for their time, this one was already given to a worker
        redis.call('ZADD', root .. ':delay', string.format('%.0f', now + ARGV[5]),
                   '\n' .. first .. replayed .. '\n' .. step .. '\n' .. count .. '\n' .. expiry .. '\n' .. e[2][2])
      end
      redis.call('XACK', stream, group, id)
      redis.call('XDEL', stream, id)
    else
      if mode == 'back' then count = math.max(0, count - 1) end
      local to = suspect(limit, count) and '~last' or '~free'
      redis.call('XCLAIM', stream, group, to, 0, id, 'RETRYCOUNT', count, 'JUSTID')
      returned = returned + 1
    end
  end
end
if freed and redis.call('LLEN', root .. ':bell') < 1 then redis.pcall('RPUSH', root .. ':bell', '1') end
-- under OOM the mark fails; consumers look without it from time to time
if returned > 0 then redis.pcall('SET', root .. ':back', '1') end
-- whoever waits must know when the first of the later ones is due
if returned > 0 or mode == 'later' then
  if redis.call('LLEN', root .. ':bell') < 1 then redis.pcall('RPUSH', root .. ':bell', '1') end
  local ttl = redis.call('PTTL', root .. ':s:' .. ARGV[9])
  if ttl > 0 then
    redis.call('PEXPIRE', root .. ':back', ttl)
    redis.call('PEXPIRE', root .. ':bell', ttl)
  end
end
return {settled, buried}
