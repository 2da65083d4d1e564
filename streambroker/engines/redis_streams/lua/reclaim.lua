-- reclaim: give a page of what a gone holder had of one queue back to the others, and forget the holder when nothing
-- is left.
-- KEYS: root of one queue
-- ARGV: 1 group, 2 gone holder, 3 delivery limit or 0, 4 page, 5 dead letters kept, 6 their age in ms,
--       7 0 (it left), 1 (it died) or 2 (it died and had messages of other queues too), 8... steps
-- Returns: {moved, ids of the dead letters, left 0/1}
-- Crash: what was moved is moved, the rest is found again. Only a holder whose pending list is empty is removed:
-- XGROUP DELCONSUMER drops pending entries for ever.
-- A lost delivery alone convicts nobody: only the one message that was handed out as a last chance, alone, is buried.
-- include promote_page
-- include suspect
-- include bury
local root, group, gone, limit, page = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local counted, now = ARGV[7] ~= '0', clock()
local moved, buried, left = 0, {}, 0

local function pending(stream, count)
  if redis.call('EXISTS', stream) == 0 then return {} end
  local p = redis.pcall('XPENDING', stream, group, '-', '+', count, gone)
  return p.err and {} or p
end

-- its waits may still be here, and would take again what is given back now
if counted then redis.call('SET', root .. ':gone:' .. gone, '1', 'EX', 600) end

local trial, trial_step, trial_id = redis.call('HGET', root .. ':trial', gone), nil, nil
if trial then trial_step, trial_id = string.match(trial, '^(%d+)|([^|]+)|') end
local company = 0
if trial then
  if ARGV[7] == '2' then company = 2 end
  for s = 8, #ARGV do company = company + #pending(root .. ':s:' .. ARGV[s], 2) end
  -- a later page must know that there was company
  if trial_id and company > 1 then redis.call('HSET', root .. ':trial', gone, 'company|' .. trial) end
  local kept = string.match(trial, '^company|(.*)$')
  if kept then
    trial_step, trial_id = string.match(kept, '^(%d+)|([^|]+)|')
    company = 2
  end
end

for s = 8, #ARGV do
  local step = ARGV[s]
  local stream = root .. ':s:' .. step
  local rows = pending(stream, page - moved)
  local to = {['~free'] = {}, ['~last'] = {}}
  for _, row in ipairs(rows) do
    local id, count = row[1], row[4]
    local on_trial = limit > 0 and step == trial_step and id == trial_id
    moved = moved + 1
    if counted and on_trial and count >= limit and (company == 1 or count >= 2 * limit) then
      buried[#buried + 1] = bury(root, group, step, id, count, 'delivery limit of ' .. limit ..
                                 ' reached: its worker died', gone, ARGV[5], ARGV[6], now) or nil
      redis.call('HDEL', root .. ':trial', gone)
    elseif not counted then
      local before = math.max(0, count - 1)
      local list = suspect(limit, before) and '~last' or '~free'
      redis.call('XCLAIM', stream, group, list, 0, id, 'RETRYCOUNT', before, 'JUSTID')
    elseif suspect(limit, count) then
      table.insert(to['~last'], id)
    else
      table.insert(to['~free'], id)
    end
  end
  for list, ids in pairs(to) do
    for i = 1, #ids, 500 do
      local words = {unpack(ids, i, math.min(i + 499, #ids))}
      words[#words + 1] = 'JUSTID'
      redis.call('XCLAIM', stream, group, list, 0, unpack(words))
    end
  end
  if #pending(stream, 1) > 0 then
    left = 1
  elseif redis.call('EXISTS', stream) == 1 then
    redis.pcall('XGROUP', 'DELCONSUMER', stream, group, gone)
  end
  if moved >= page then left = 1 break end
end
if left == 0 then redis.call('HDEL', root .. ':trial', gone, gone .. ' long') end
if moved > #buried then redis.pcall('SET', root .. ':back', '1') end
-- also without anything to move: the dead one may have been woken for what others can have
if redis.call('EXISTS', root .. ':s:' .. ARGV[8]) == 1 then
  if redis.call('LLEN', root .. ':bell') < 1 then redis.pcall('RPUSH', root .. ':bell', '1') end
  local ttl = redis.call('PTTL', root .. ':s:' .. ARGV[8])
  if ttl > 0 then
    redis.call('PEXPIRE', root .. ':back', ttl)
    redis.call('PEXPIRE', root .. ':bell', ttl)
  end
end
return {moved, buried, left}
