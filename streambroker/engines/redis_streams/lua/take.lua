-- take: hand out up to n messages of some queues to one holder, in strict order of priority steps within a queue:
-- last-chance and handed-back ones first, then new ones. Promotes what is due.
-- KEYS: roots of the queues in the order to serve them; all keys of a queue start with its root and share its slot. In
--       a cluster one queue, and a guard that is never there
-- ARGV: 1 group, 2 holder, 3 no-ack 0/1, 4 look for handed-back ones even without their mark 0/1,
--       5 how long (ms) a trial keeps other last-chance messages (a strict one: all others) from the holder, 6 count of steps, then the steps,
--       then for each queue: delivery limit or 0, message TTL in ms or 0; last: n
-- Returns: {ms until there may be more without a bell (a delayed message is due, a trial ends) or -1, entries...}; an
--   entry is {queue number, step, id, count, came back 0/1, fields}, or {queue number, error text} for a queue that failed.
-- Crash: before it nothing is handed out; after it the holder has them, and its lease or death gives them back.
-- include promote_page
-- include suspect
local group, me, noack = ARGV[1], ARGV[2], ARGV[3] == '1'
local steps, n = tonumber(ARGV[6]), tonumber(ARGV[#ARGV])
local queues = (#ARGV - 7 - steps) / 2
local out, due, now = {-1}, -1, clock()

-- the group is made where it is missing, always from the first entry on: after FLUSHALL, a failover to an empty
-- replica or a deleted stream nothing is skipped
local function grouped(stream, call)
  local r = call()
  if type(r) == 'table' and r.err then
    if not string.find(r.err, 'NOGROUP') then return nil, r.err end
    if redis.call('EXISTS', stream) == 0 then return nil end
    redis.call('XGROUP', 'CREATE', stream, group, '0')
    r = call()
    if type(r) == 'table' and r.err then return nil, r.err end
  end
  return r
end

local function pending(stream, count, who)
  return grouped(stream, function() return redis.pcall('XPENDING', stream, group, '-', '+', count, who) end) or {}
end

local function held(root)
  for s = 1, steps do
    local stream = root .. ':s:' .. ARGV[6 + s]
    if redis.call('EXISTS', stream) == 1 and #pending(stream, 1, me) > 0 then return true end
  end
  return false
end

local function again_after(ms)
  ms = tonumber(ms)
  if due < 0 or ms < due then due = ms end
end

-- whether this holder has something of any of the queues
local function busy()
  for i = 1, queues do
    if held(KEYS[i]) then return true end
  end
  return false
end

-- It waited in vain to be empty: something that it has of each queue is remembered, and is not waited for again. Many
-- suspects behind it would take as many times as long.
local function lapse()
  for i = 1, queues do
    for s = 1, steps do
      local stream = KEYS[i] .. ':s:' .. ARGV[6 + s]
      local p = redis.call('EXISTS', stream) == 1 and pending(stream, 1, me) or {}
      if #p > 0 then
        redis.call('HSET', KEYS[i] .. ':trial', me .. ' long', ARGV[6 + s] .. '|' .. p[1][1])
        break
      end
    end
  end
end

local function has_lapsed()
  for i = 1, queues do
    local long = redis.call('HGET', KEYS[i] .. ':trial', me .. ' long')
    if long then
      local step, id = string.match(long, '^(%d+)|(.+)$')
      local p = step and redis.pcall('XPENDING', KEYS[i] .. ':s:' .. step, group, id, id, 1, me)
      if p and not p.err and #p > 0 then return true end
      redis.call('HDEL', KEYS[i] .. ':trial', me .. ' long')
    end
  end
  return false
end

local function serve(q)
  local root = KEYS[q]
  local limit, ttl = tonumber(ARGV[5 + steps + 2 * q]), tonumber(ARGV[6 + steps + 2 * q])
  local bell, back, trials = root .. ':bell', root .. ':back', root .. ':trial'
  local gone = root .. ':gone:' .. me
  local wait = next_due(root, now)
  if wait == 0 then
    promote_page(root, now, 100)
    wait = next_due(root, now)
  end
  if wait >= 0 then again_after(wait) end

  -- trial: this holder has a last-chance message; strict: it gets nothing else of the queue meanwhile; waiting: it gets
  -- nothing until it is empty, to have one alone
  local slow, trial, strict, given, suspects = false, false, false, 0, false
  local marks = redis.call('EXISTS', back, trials, gone)
  if marks > 0 and redis.call('EXISTS', gone) == 1 then
    -- a frozen process that was declared dead while its wait was still here: whoever waits next is woken in its place
    if redis.call('LLEN', bell) < 1 then redis.pcall('RPUSH', bell, '1') end
    return
  end
  if ARGV[4] == '1' or marks > 0 then
    slow = true
    trial = redis.call('HGET', trials, me)
    local waits = trial and string.match(trial, '^wait|(%d+)$')
    if waits then
      strict = tonumber(waits) > now and busy()
      if strict then again_after(waits - now) end
      if not strict then
        redis.call('HDEL', trials, me)
        if tonumber(waits) <= now then lapse() end
      end
      trial = strict
    elseif trial then
      local step, id, alone_ms, until_ms = string.match(trial, '^(%d+)|([^|]+)|(%d+)|(%d+)$')
      local p = step and redis.pcall('XPENDING', root .. ':s:' .. step, group, id, id, 1, me)
      if not p or p.err or #p == 0 then
        redis.call('HDEL', trials, me)
        trial = false
      else
        -- whoever lives through its time is not waited for: a long task would hold up all other suspects
        trial, strict = tonumber(until_ms) > now, tonumber(alone_ms) > now
        if trial then again_after(until_ms - now) end
      end
    end
  end

  local function emit(step, e, count, came_back)
    local fields = e[2]
    local extra = {}
    if fields[1] == 'm' then
      for j = 3, #fields, 2 do extra[fields[j]] = tonumber(fields[j + 1]) end
      -- a count that we did not write: the server would refuse it
      if extra.c and (extra.c < 1 or extra.c > 1e6 or extra.c % 1 ~= 0) then extra.c = nil end
      if (extra.x and extra.x <= now) or (ttl > 0 and now - tonumber(string.match(e[1], '^%d+')) >= ttl) then
        redis.call('XACK', root .. ':s:' .. step, group, e[1])
        redis.call('XDEL', root .. ':s:' .. step, e[1])
        return
      end
    end
    if extra.c and not came_back then
      -- deliveries before a delayed requeue count too
      if suspect(limit, extra.c) and not noack then
        redis.call('XCLAIM', root .. ':s:' .. step, group, '~last', 0, e[1], 'RETRYCOUNT', extra.c, 'JUSTID')
        redis.pcall('SET', back, '1')
        slow, suspects = true, true
        return
      end
      count = extra.c + 1
      came_back = true
      redis.call('XCLAIM', root .. ':s:' .. step, group, me, 0, e[1], 'RETRYCOUNT', count, 'JUSTID')
    end
    out[#out + 1] = {q, step, e[1], count, came_back and 1 or 0, fields}
    n, given = n - 1, given + 1
    if noack then
      redis.call('XACK', root .. ':s:' .. step, group, e[1])
      redis.call('XDEL', root .. ':s:' .. step, e[1])
    end
  end

  local function reclaimed(stream, step, rows)
    local ids, counts, found = {}, {}, {}
    for i = 1, #rows do
      ids[i] = rows[i][1]
      counts[rows[i][1]] = rows[i][4]
    end
    for _, e in ipairs(redis.call('XCLAIM', stream, group, me, 0, unpack(ids))) do
      if e and e[2] then
        found[e[1]] = true
        emit(step, e, counts[e[1]] + 1, true)
      end
    end
    -- Redis 6.2 keeps deleted entries pending for ever
    for i = 1, #ids do
      if not found[ids[i]] then redis.call('XACK', stream, group, ids[i]) end
    end
  end

  -- One last-chance message at a time, of all queues that this holder takes from (in a cluster: of this one). One that was already lost in company
  -- must be alone; while this holder has something, others behind it may go, or else this holder waits until it is empty.
  local function give_last_chance(stream, step)
    if trial then return end
    local company = #out > 1
    for i = 1, queues do
      local elsewhere = i ~= q and redis.call('HGET', KEYS[i] .. ':trial', me)
      local till = elsewhere and tonumber(string.match(elsewhere, '^%d+|[^|]+|%d+|(%d+)$'))
      if till and till > now then
        again_after(till - now)
        return
      end
    end
    company = company or busy()
    local must_wait, lapsed = false, nil
    for _, row in ipairs(pending(stream, 100, '~last')) do
      local alone = limit > 0 and row[4] >= limit
      if alone and company then
        if lapsed == nil then lapsed = has_lapsed() end
        alone = not lapsed
      end
      if alone and company then
        must_wait = true
      else
        local before = given
        reclaimed(stream, step, {row})
        if given > before and limit > 0 and not noack then
          local till = now + ARGV[5]
          redis.call('HSET', trials, me, string.format('%s|%s|%.0f|%.0f', step, row[1], alone and till or 0, till))
          trial, strict = true, alone
          again_after(ARGV[5])
          -- one of another queue that is still out has lived through its time: it is not the one
          for i = 1, queues do
            local other = i ~= q and redis.call('HGET', KEYS[i] .. ':trial', me)
            if other and string.find(other, '^%d') then redis.call('HDEL', KEYS[i] .. ':trial', me) end
          end
        end
        if given > before then return end
      end
    end
    if must_wait then
      for _, other in ipairs(redis.call('HVALS', trials)) do
        local till = string.match(other, '^wait|(%d+)$')
        if till and tonumber(till) > now then return end
      end
      redis.call('HSET', trials, me, string.format('wait|%.0f', now + ARGV[5]))
      trial, strict = true, true
      again_after(ARGV[5])
    end
  end

  local failed
  local others = {}
  for s = 2, steps do others[#others + 1] = root .. ':s:' .. ARGV[6 + s] end
  if not strict then
    for s = 1, steps do
      if n <= 0 then break end
      local step = ARGV[6 + s]
      local stream = root .. ':s:' .. step
      -- the first step is nearly always there: its own read tells when it is not; the others rarely are
      if s == 2 and #others > 1 and redis.call('EXISTS', unpack(others)) == 0 then break end
      if s == 1 or redis.call('EXISTS', stream) == 1 then
        if slow then
          give_last_chance(stream, step)
          if strict then break end
          while n > 0 do
            local rows = pending(stream, math.min(n, 500), '~free')
            if #rows == 0 then break end
            reclaimed(stream, step, rows)
          end
        end
        while n > 0 do
          local asked = math.min(n, 500)
          local r, err = grouped(stream, function()
            return redis.pcall('XREADGROUP', 'GROUP', group, me, 'COUNT', asked, 'STREAMS', stream, '>')
          end)
          if err then failed = err end
          if not r then break end
          local entries = r[1][2]
          for i = 1, #entries do emit(step, entries[i], 1, false) end
          if #entries < asked then break end
        end
        if suspects and n > 0 then
          suspects = false
          give_last_chance(stream, step)
          if strict then break end
        end
      end
    end
    if failed then
      out[#out + 1] = {q, failed}
    elseif n > 0 then
      redis.call('DEL', bell)
      if slow and not trial then
        local left = false
        for s = 1, steps do
          local stream = root .. ':s:' .. ARGV[6 + s]
          if redis.call('EXISTS', stream) == 1 and (#pending(stream, 1, '~last') > 0 or #pending(stream, 1, '~free') > 0) then
            left = true
          end
        end
        if not left then redis.call('DEL', back) end
      end
    elseif redis.call('LLEN', bell) < 1 then
      -- the next idle consumer looks whether there is more; under OOM it does so at its own time
      redis.pcall('RPUSH', bell, '1')
      local ttl_ms = redis.call('PTTL', root .. ':s:' .. ARGV[7])
      if ttl_ms > 0 then redis.call('PEXPIRE', bell, ttl_ms) end
    end
  end
end

for q = 1, queues do
  -- a key of another type, say: it costs its own queue alone, and nothing that was handed out is forgotten
  local ok, err = pcall(serve, q)
  if not ok then out[#out + 1] = {q, type(err) == 'table' and err.err or tostring(err)} end
  if n <= 0 then break end
end
out[1] = due
return out
