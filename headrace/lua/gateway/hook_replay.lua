-- uses: base
-- Sends a delivery again from its first attempt on, under its own id. ARGV: delivery id, ttl ms.
-- Returns "ok" or "gone".
local k = {delivery = KEYS[1], due = KEYS[2]}
if redis.call('EXISTS', k.delivery) == 0 then return 'gone' end
redis.call('HSET', k.delivery, 'status', 'pending', 'attempts', 0, 'next', now_ms())
redis.call('HINCRBY', k.delivery, 'replays', 1)
redis.call('PEXPIRE', k.delivery, ARGV[2])
redis.call('ZADD', k.due, now_ms(), ARGV[1])
redis.call('PEXPIRE', k.due, ARGV[2])
return 'ok'
