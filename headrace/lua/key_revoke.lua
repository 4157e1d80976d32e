-- Revokes an API key: it stays in the list for a while, marked. ARGV: id, ms that it stays. Returns "ok" or "unknown".
local k = {keys = KEYS[1], key = KEYS[2]}
if redis.call('HEXISTS', k.key, 'digest') == 0 then
  redis.call('ZREM', k.keys, ARGV[1])
  return 'unknown'
end
local t = redis.call('TIME')
redis.call('HSETNX', k.key, 'revoked_ms', t[1] * 1000 + math.floor(t[2] / 1000))
local left = redis.call('PTTL', k.key)
if left < 0 or left > tonumber(ARGV[2]) then redis.call('PEXPIRE', k.key, ARGV[2]) end
return 'ok'
