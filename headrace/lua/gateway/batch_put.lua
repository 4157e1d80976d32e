-- uses: base
-- Takes a batch in, within the tenant's ceiling. ARGV: id, ttl ms, most batches, window ms, fields…
-- Returns {"ok" or "batches", when it expires}.
local k = {batch = KEYS[1], batches = KEYS[2], due = KEYS[3]}
local id, ttl_ms, now = ARGV[1], tonumber(ARGV[2]), now_ms()
redis.call('ZREMRANGEBYSCORE', k.batches, '-inf', now)
if redis.call('ZCARD', k.batches) >= tonumber(ARGV[3]) then return {'batches'} end
redis.call('HSET', k.batch, 'expires', now + tonumber(ARGV[4]), unpack(ARGV, 5))
redis.call('PEXPIRE', k.batch, ttl_ms)
redis.call('ZADD', k.batches, now + ttl_ms, id)
redis.call('PEXPIRE', k.batches, ttl_ms)
redis.call('ZADD', k.due, now, id)
redis.call('PEXPIRE', k.due, ttl_ms)
return {'ok'}
