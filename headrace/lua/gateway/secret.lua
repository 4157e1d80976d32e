-- The secrets from which tenants' own are made, newest first; the given one when there is none yet.
local k = {secrets = KEYS[1]}
if redis.call('EXISTS', k.secrets) == 0 then redis.call('LPUSH', k.secrets, ARGV[1]) end
return redis.call('LRANGE', k.secrets, 0, 1)
