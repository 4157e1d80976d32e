-- uses: base
-- Stores a response before its job is submitted. ARGV: id, ttl ms, fields…
local k = {record = KEYS[1], open = KEYS[2]}
redis.call('DEL', k.record)
redis.call('HSET', k.record, unpack(ARGV, 3))
redis.call('PEXPIRE', k.record, ARGV[2])
redis.call('ZADD', k.open, now_ms(), ARGV[1])
redis.call('PEXPIRE', k.open, ARGV[2])
return 'ok'
