-- Keeps a new API key and enters it in the list. ARGV: id, most keys there may be, ms to live (0: for ever), fields of the key…
-- Returns "ok", "full" or "exists".
local k = {keys = KEYS[1], key = KEYS[2]}
local ttl_ms = tonumber(ARGV[3])
if redis.call('ZCARD', k.keys) >= tonumber(ARGV[2]) then return 'full' end
if redis.call('EXISTS', k.key) == 1 then return 'exists' end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('HSET', k.key, 'created_ms', now, unpack(ARGV, 4))
if ttl_ms > 0 then
  redis.call('HSET', k.key, 'expires_ms', now + ttl_ms)
  redis.call('PEXPIREAT', k.key, now + ttl_ms)
end
redis.call('ZADD', k.keys, now, ARGV[1])
return 'ok'
