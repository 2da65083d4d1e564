-- drop: remove the waiting messages of some jobs, one page of a queue.
-- KEYS: delay set   ARGV: 1 cursor, 2 page, 3... message ids
-- Returns: {next cursor, removed}.   Crash: what is removed is removed; the rest waits on.
local wanted, removed, words = {}, 0, {KEYS[1], ARGV[1], 'COUNT', ARGV[2]}
for i = 3, #ARGV do wanted[ARGV[i]] = true end
if #ARGV == 3 then
  -- the most frequent case; the server compares several times quicker than a script
  words[5], words[6] = 'MATCH', string.gsub(ARGV[3], '[\\*?%[%]]', '\\%0') .. '\n*'
end
local page = redis.call('ZSCAN', unpack(words))
for i = 1, #page[2], 2 do
  local member = page[2][i]
  if wanted[string.match(member, '^([^\n]*)\n')] then removed = removed + redis.call('ZREM', KEYS[1], member) end
end
return {page[1], removed}
