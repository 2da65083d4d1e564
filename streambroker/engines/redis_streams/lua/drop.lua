-- drop: remove the waiting messages of some jobs, one page of a queue.
-- KEYS: delay set   ARGV: 1 cursor, 2 page, 3... message ids
-- Returns: {next cursor, removed}.   Crash: what is removed is removed; the rest waits on.
local wanted, removed = {}, 0
for i = 3, #ARGV do wanted[ARGV[i]] = true end
local page = redis.call('ZSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
for i = 1, #page[2], 2 do
  local member = page[2][i]
  if wanted[string.match(member, '^([^\n]*)\n')] then removed = removed + redis.call('ZREM', KEYS[1], member) end
end
return {page[1], removed}
