-- uses: base
-- Turns a noted end into a delivery, once, and drops the note in the same change.
-- ARGV: entry id, delivery id, ttl ms, most deliveries listed, fields…
local k = {hooks = KEYS[1], delivery = KEYS[2], deliveries = KEYS[3], due = KEYS[4]}
local entry, id, ttl_ms, most, now = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), now_ms()
if redis.call('EXISTS', k.delivery) == 0 then
  redis.call('HSET', k.delivery, 'status', 'pending', 'attempts', 0, 'created', now, unpack(ARGV, 5))
  redis.call('PEXPIRE', k.delivery, ttl_ms)
  redis.call('ZADD', k.deliveries, now, id)
  redis.call('ZREMRANGEBYSCORE', k.deliveries, '-inf', now - ttl_ms)
  redis.call('ZREMRANGEBYRANK', k.deliveries, 0, -most - 1)
  redis.call('PEXPIRE', k.deliveries, ttl_ms)
  redis.call('ZADD', k.due, now, id)
  redis.call('PEXPIRE', k.due, ttl_ms)
end
redis.call('XDEL', k.hooks, entry)
return 'ok'
