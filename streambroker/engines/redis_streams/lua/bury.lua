-- (part) Copies an entry into the dead letters of its queue and removes it, in one step. With `message` (not empty) the
-- copy has that in place of its own. Returns the id of the dead letter, or false when the entry is gone.
local function bury(root, group, step, id, count, reason, holder, most, age_ms, now, message)
  local stream, dead = root .. ':s:' .. step, root .. ':dead'
  local e, grave = redis.call('XRANGE', stream, id, id)[1], false
  if e then
    local fields = e[2]
    -- more words than one call can take: none of ours
    if #fields > 4000 then fields = {'fields', cmsgpack.pack(fields)} end
    local copy = {dead, '*'}
    local first = string.match(id, '^%d+')
    for i = 1, #fields do
      copy[#copy + 1] = fields[i]
      if i % 2 == 1 and i > 1 and fields[i] == 'f' then first = fields[i + 1] end
      if i == 2 and fields[1] == 'm' and message and message ~= '' then copy[#copy] = message end
    end
    for _, word in ipairs({'~reason', reason, '~count', count, '~holder', holder, '~step', step,
                           '~first', first, '~last', string.format('%.0f', now)}) do
      copy[#copy + 1] = word
    end
    grave = redis.call('XADD', unpack(copy))
    redis.call('XTRIM', dead, 'MAXLEN', most)
    redis.call('XTRIM', dead, 'MINID', string.format('%.0f', math.max(0, now - age_ms)))
  end
  redis.call('XACK', stream, group, id)
  redis.call('XDEL', stream, id)
  return grave
end
