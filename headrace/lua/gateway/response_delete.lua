-- Forgets a response. ARGV: id.
local k = {record = KEYS[1], open = KEYS[2]}
redis.call('ZREM', k.open, ARGV[1])
return redis.call('DEL', k.record)
