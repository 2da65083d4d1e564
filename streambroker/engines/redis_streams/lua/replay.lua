-- replay: put dead letters back as new messages of their step.
-- KEYS: root   ARGV: ids       Returns: how many moved.
-- Crash: each is a dead letter or a message, never both or none.
local dead, n = KEYS[1] .. ':dead', 0
for i = 1, #ARGV do
  local e = redis.call('XRANGE', dead, ARGV[i], ARGV[i])[1]
  if e then
    local words, step = {}, '0'
    for j = 1, #e[2], 2 do
      local name = e[2][j]
      if name == '~step' then step = string.match(e[2][j + 1], '^%d+$') or '0' end
      if string.sub(name, 1, 1) ~= '~' and name ~= 'c' and name ~= 'x' and name ~= 'f' and name ~= 'r' then
        words[#words + 1] = name
        words[#words + 1] = e[2][j + 1]
      end
    end
    if #words == 0 then words = {'foreign', ''} end
    if words[1] == 'm' then
      words[#words + 1] = 'r'
      words[#words + 1] = '1'
    end
    redis.call('XADD', KEYS[1] .. ':s:' .. step, '*', unpack(words))
    redis.call('XDEL', dead, ARGV[i])
    n = n + 1
  end
end
if redis.call('XLEN', dead) == 0 then redis.call('DEL', dead) end
if n > 0 and redis.call('LLEN', KEYS[1] .. ':bell') < 1 then redis.call('RPUSH', KEYS[1] .. ':bell', '1') end
return n
