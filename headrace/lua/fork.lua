-- uses: base
-- Takes in a job whose log begins with events of another: a worker goes on from them as after a takeover.
-- ARGV: class, id, body hash, max entries (0: any), job ttl ms, tenant, deadline ttl ms, prompt tokens, number of events,
-- then for each event {number of values, values…}, then the entry's fields.
-- Returns {"ok", id, entry}, {"existing", id, entry}, {"conflict"} or {"overloaded"}.
local k = {queue = set_of(KEYS, 1), job = KEYS[4], log = KEYS[5]}
local class, id, body, max_entries = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local job_ttl_ms, ttl_ms, events = tonumber(ARGV[5]), tonumber(ARGV[7]), tonumber(ARGV[9])

local state = redis.call('HMGET', k.job, 'status', 'body', 'entry')
if state[1] then
  if state[2] ~= body then return {'conflict', 'id'} end
  return {'existing', id, state[3] or ''}
end
local entries = 0
for _, name in ipairs(CLASSES) do
  local length = redis.pcall('XLEN', k.queue[name])
  entries = entries + (wrong_type(length) and 0 or length)
end
if max_entries > 0 and entries >= max_entries then return {'overloaded', 'entries'} end

local now, at = now_ms(), 10
redis.call('DEL', k.job, k.log)
for seq = 1, events do
  local stop = at + tonumber(ARGV[at])
  redis.call('XADD', k.log, seq .. '-0', unpack(ARGV, at + 1, stop))
  at = stop + 1
end
local entry = redis.call('XADD', k.queue[class], '*', unpack(ARGV, at))
redis.call('HSET', k.job, 'status', 'queued', 'seq', events, 'epoch', 0, 'attempt', 0, 'class', class, 'entry', entry,
  'tenant', ARGV[6], 't_submit', submitted_ms(entry, now), 'body', body, 'prompt_tokens', ARGV[8])
if ttl_ms > 0 then redis.call('HSET', k.job, 'deadline', submitted_ms(entry, now) + ttl_ms) end
redis.call('PEXPIRE', k.job, job_ttl_ms)
redis.call('PEXPIRE', k.log, job_ttl_ms)
return {'ok', id, entry}
