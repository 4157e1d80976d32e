-- uses: base
-- Makes an uploaded file known, within the tenant's ceilings. ARGV: id, bytes, ttl ms, most files, most bytes, fields…
-- Returns "ok", "files" or "bytes".
local k = {file = KEYS[1], data = KEYS[2], files = KEYS[3], bytes = KEYS[4]}
local id, size, ttl_ms, most, most_bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()

for _, gone in ipairs(redis.call('ZRANGEBYSCORE', k.files, '-inf', now)) do
  redis.call('ZREM', k.files, gone)
  redis.call('HDEL', k.bytes, gone)
end
local held = 0
for _, each in ipairs(redis.call('HVALS', k.bytes)) do held = held + tonumber(each) end
if redis.call('ZCARD', k.files) >= most then return 'files' end
if held + size > most_bytes then return 'bytes' end
redis.call('HSET', k.file, 'bytes', size, 'expires', now + ttl_ms, unpack(ARGV, 6))
redis.call('PEXPIRE', k.file, ttl_ms)
redis.call('PEXPIRE', k.data, ttl_ms)
redis.call('ZADD', k.files, now + ttl_ms, id)
redis.call('HSET', k.bytes, id, size)
if redis.call('PTTL', k.files) < ttl_ms then redis.call('PEXPIRE', k.files, ttl_ms) end
if redis.call('PTTL', k.bytes) < ttl_ms then redis.call('PEXPIRE', k.bytes, ttl_ms) end
return 'ok'
