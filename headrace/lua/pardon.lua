-- uses: base suspects
-- Takes back what was held against jobs when their worker turns out to live: it was frozen, or cut off.
-- ARGV: worker, then {member, epoch} for each job. Returns how many deaths were struck out.
local k = {suspects = KEYS[1]}
local worker, struck = ARGV[1], 0
for i = 2, #KEYS do
  local member, epoch = ARGV[i * 2 - 2], tonumber(ARGV[i * 2 - 1])
  local known = redis.pcall('HGET', k.suspects, member)
  if type(known) == 'string' and known:match('^%d+ (.*)$') == worker then redis.call('HDEL', k.suspects, member) end
  local history = redis.pcall('HGET', KEYS[i], 'history')
  local left, found = without_death(type(history) == 'string' and history or '', worker, epoch)
  if found then
    redis.call('HSET', KEYS[i], 'history', left)
    struck = struck + 1
  end
end
return struck
