-- uses: base
-- Takes a job in once: by idempotency key and by id; within the ceilings of entries and bytes.
-- ARGV: class, id, body hash, idem ttl ms (0: no key), max entries, max bytes (0: none), job ttl ms, tenant, deadline ttl ms, fields…
-- Returns {"ok"|"existing", id, entry} or {"conflict"|"overloaded", …}.
local k = {queue = set_of(KEYS, 1), job = KEYS[4], idem = KEYS[5], log = KEYS[6]}
local class, id, body, idem_ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local max_entries, max_bytes, job_ttl_ms = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])

if idem_ttl_ms > 0 then
  local known = redis.call('GET', k.idem)
  if known then
    local known_id, known_body = known:match('^(%S+) (%S*)$')
    if known_body ~= body then return {'conflict', 'idempotency_key'} end
    return {'existing', known_id, ''}
  end
end

local state = redis.call('HMGET', k.job, 'status', 'body', 'class', 'entry')
if state[1] then
  if state[2] ~= body then return {'conflict', 'id'} end
  return {'existing', id, state[4] or ''}
end

local entries, bytes = 0, 0
for _, name in ipairs(CLASSES) do
  local length = redis.pcall('XLEN', k.queue[name])
  entries = entries + (wrong_type(length) and 0 or length)
  if max_bytes > 0 then bytes = bytes + (redis.call('MEMORY', 'USAGE', k.queue[name]) or 0) end
end
if max_entries > 0 and entries >= max_entries then return {'overloaded', 'entries'} end
if max_bytes > 0 and bytes >= max_bytes then return {'overloaded', 'bytes'} end

local now = now_ms()
local entry = redis.call('XADD', k.queue[class], '*', unpack(ARGV, 10))
redis.call('DEL', k.job, k.log) -- an old cancel flag of an id nobody had, and events without a job
redis.call('HSET', k.job, 'status', 'queued', 'seq', 0, 'epoch', 0, 'attempt', 0, 'class', class, 'entry', entry,
  'tenant', ARGV[8], 't_submit', submitted_ms(entry, now), 'body', body)
local ttl_ms = tonumber(ARGV[9])
if ttl_ms > 0 then redis.call('HSET', k.job, 'deadline', submitted_ms(entry, now) + ttl_ms) end
redis.call('PEXPIRE', k.job, job_ttl_ms)
if idem_ttl_ms > 0 then redis.call('SET', k.idem, id .. ' ' .. body, 'PX', idem_ttl_ms) end
return {'ok', id, entry}
