-- uses: base
-- Takes in a job whose log begins with events of another: a worker goes on from them as after a takeover.
-- ARGV: class, id, body hash, max entries, max bytes (0: any), job ttl ms, tenant, deadline ttl ms, prompt tokens, number of
-- events, then for each event {number of values, values…}, then the entry's fields.
-- Returns {"ok", id, entry}, {"existing", id, entry}, {"conflict"} or {"overloaded", "entries"|"bytes"}.
local k = {queue = set_of(KEYS, 1), job = KEYS[4], log = KEYS[5]}
local class, id, body, max_entries, max_bytes = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local job_ttl_ms, ttl_ms, events = tonumber(ARGV[6]), tonumber(ARGV[8]), tonumber(ARGV[10])

local state = redis.call('HMGET', k.job, 'status', 'body', 'entry')
if state[1] then
  if state[2] ~= body then return {'conflict', 'id'} end
  return {'existing', id, state[3] or ''}
end
local full = full_of(k.queue, max_entries, max_bytes)
if full then return {'overloaded', full} end

local now, at = now_ms(), 11
redis.call('DEL', k.job, k.log)
for seq = 1, events do
  local stop = at + tonumber(ARGV[at])
  redis.call('XADD', k.log, seq .. '-0', unpack(ARGV, at + 1, stop))
  at = stop + 1
end
local entry = redis.call('XADD', k.queue[class], '*', unpack(ARGV, at))
redis.call('HSET', k.job, 'status', 'queued', 'seq', events, 'epoch', 0, 'attempt', 0, 'class', class, 'entry', entry,
  'tenant', ARGV[7], 't_submit', submitted_ms(entry, now), 'body', body, 'prompt_tokens', ARGV[9])
if ttl_ms > 0 then redis.call('HSET', k.job, 'deadline', submitted_ms(entry, now) + ttl_ms) end
redis.call('PEXPIRE', k.job, job_ttl_ms)
redis.call('PEXPIRE', k.log, job_ttl_ms)
return {'ok', id, entry}
