-- uses: base
-- Moves a batch from one status to another, once. ARGV: id, from, to, 1 if that is its end, fields…
-- Returns whether it moved.
local k = {batch = KEYS[1], due = KEYS[2]}
if redis.call('HGET', k.batch, 'status') ~= ARGV[2] then return 0 end
redis.call('HSET', k.batch, 'status', ARGV[3], ARGV[3] .. '_at', now_ms(), unpack(ARGV, 5))
if ARGV[4] == '1' then redis.call('ZREM', k.due, ARGV[1]) else redis.call('ZADD', k.due, now_ms(), ARGV[1]) end
return 1
