-- uses: base
-- Hands out what is due, at most once within the lease: after that it is due again. ARGV: most, lease ms.
local k = {due = KEYS[1]}
local now = now_ms()
local found = redis.call('ZRANGEBYSCORE', k.due, '-inf', now, 'LIMIT', 0, tonumber(ARGV[1]))
for _, id in ipairs(found) do redis.call('ZADD', k.due, 'XX', now + tonumber(ARGV[2]), id) end
return found
