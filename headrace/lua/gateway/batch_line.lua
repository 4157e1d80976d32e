-- Goes on to the next line, once, with what became of this one. ARGV: line, offset behind it, kind ("open": its job was
-- submitted; "failed": it is answered already), job or answer, bytes of the answer, ttl ms. Returns whether it went on.
local k = {batch = KEYS[1], open = KEYS[2], data = KEYS[3]}
if redis.call('HGET', k.batch, 'line') ~= ARGV[1] then return 0 end
redis.call('HSET', k.batch, 'line', ARGV[1] + 1, 'offset', ARGV[2])
if ARGV[3] == 'open' then
  redis.call('HSET', k.open, ARGV[1], ARGV[4])
  redis.call('PEXPIRE', k.open, ARGV[6])
else
  redis.call('RPUSH', k.data, ARGV[4])
  redis.call('PEXPIRE', k.data, ARGV[6])
  redis.call('HINCRBY', k.batch, 'failed', 1)
  redis.call('HINCRBY', k.batch, 'error_bytes', ARGV[5])
end
return 1
