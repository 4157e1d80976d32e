-- Forgets a file. ARGV: id. Returns whether it was there.
local k = {file = KEYS[1], data = KEYS[2], files = KEYS[3], bytes = KEYS[4]}
redis.call('DEL', k.data)
redis.call('ZREM', k.files, ARGV[1])
redis.call('HDEL', k.bytes, ARGV[1])
return redis.call('DEL', k.file)
