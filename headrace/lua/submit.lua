-- uses: base cost forecast
-- Takes a job in once: by idempotency key and by id; within the ceilings of entries and bytes.
-- ARGV: class, id, body hash, idem ttl ms (0: no key), max entries, max bytes (0: none), job ttl ms, tenant, deadline ttl ms,
-- 1 to refuse a deadline that cannot be met, output weight, default output, fields…
-- Returns {"ok"|"existing", id, entry}, {"conflict", field}, {"overloaded", "entries"|"bytes", ms after which to try again}
-- or {"cannot_meet_deadline", ms it would take}.
local k = {queue = set_of(KEYS, 1), job = KEYS[4], idem = KEYS[5], log = KEYS[6], ready = set_of(KEYS, 7), vtime = KEYS[10]}
local class, id, body, idem_ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local output_weight, default_output, FIELDS, PART_TO_DRAIN = tonumber(ARGV[11]), tonumber(ARGV[12]), 13, 0.1
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

local e = estimate({unpack(ARGV, FIELDS)}, default_output)
local ahead = forecast(k, class, e.tenant, cost_of(e, output_weight))
local full = full_of(k.queue, max_entries, max_bytes)
if full then
  local rate = pace(k)
  return {'overloaded', full, exact(math.ceil(rate > 0 and ahead.all * PART_TO_DRAIN / rate or 0))}
end
local now, ttl_ms = now_ms(), tonumber(ARGV[9])
local takes_ms = ttl_ms > 0 and ahead.ms and duration(k, e.output)
local late = takes_ms and ahead.ms + takes_ms > ttl_ms
if late and ARGV[10] == '1' then return {'cannot_meet_deadline', exact(math.ceil(ahead.ms + takes_ms)), ''} end
if takes_ms then redis.pcall('HINCRBY', k.vtime, 'shadow:jobs', 1) end
if late then redis.pcall('HINCRBY', k.vtime, 'shadow:late', 1) end

local entry = redis.call('XADD', k.queue[class], '*', unpack(ARGV, FIELDS))
redis.call('DEL', k.job, k.log) -- an old cancel flag of an id nobody had, and events without a job
redis.call('HSET', k.job, 'status', 'queued', 'seq', 0, 'epoch', 0, 'attempt', 0, 'class', class, 'entry', entry,
  'tenant', ARGV[8], 't_submit', submitted_ms(entry, now), 'body', body)
redis.call('HSET', k.job, 'ahead_tokens', exact(math.ceil(ahead.cost)))
if ahead.ms then redis.call('HSET', k.job, 'eta_ms', exact(math.ceil(ahead.ms))) end
if late then redis.call('HSET', k.job, 'late', 1) end
if ttl_ms > 0 then redis.call('HSET', k.job, 'deadline', submitted_ms(entry, now) + ttl_ms) end
redis.call('PEXPIRE', k.job, job_ttl_ms)
if idem_ttl_ms > 0 then redis.call('SET', k.idem, id .. ' ' .. body, 'PX', idem_ttl_ms) end
return {'ok', id, entry}
