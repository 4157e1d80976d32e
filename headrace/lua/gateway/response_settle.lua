-- Keeps a response's answer; the first one stays. ARGV: id, answer.
local k = {record = KEYS[1], open = KEYS[2]}
if redis.call('EXISTS', k.record) == 1 then redis.call('HSETNX', k.record, 'final', ARGV[2]) end
redis.call('ZREM', k.open, ARGV[1])
return 'ok'
