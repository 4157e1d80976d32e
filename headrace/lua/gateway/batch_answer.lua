-- Writes a line's answer, once. ARGV: line, kind ("completed" or "failed"), answer, its bytes, ttl ms.
local k = {batch = KEYS[1], open = KEYS[2], data = KEYS[3]}
if redis.call('HDEL', k.open, ARGV[1]) == 0 then return 0 end
redis.call('RPUSH', k.data, ARGV[3])
redis.call('PEXPIRE', k.data, ARGV[5])
redis.call('HINCRBY', k.batch, ARGV[2], 1)
redis.call('HINCRBY', k.batch, ARGV[2] == 'completed' and 'output_bytes' or 'error_bytes', ARGV[4])
return 1
