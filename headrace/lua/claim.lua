-- uses: base cost suspects ending
-- Makes picked jobs this worker's: raises epoch and attempt. Ends those cancelled, past their deadline, tried too often
-- or damaged, and drops second entries of a job. A worker's death is held against a job only if the job ran alone.
-- ARGV: worker, lease ms, max attempts, retention ms, nonce ("<the worker's life>.<which claim>"), output weight, default output, then {class, entry, id, ttl ms} for each item.
-- Returns {outcome, epoch, attempt, ms left (-1: no deadline), last seq, submitted ms, waited ms} for each item.
local k = {
  queue = set_of(KEYS, 1), ready = set_of(KEYS, 4),
  vtime = KEYS[7], leases = KEYS[8], deadlines = KEYS[9], ids = KEYS[10], hooks = KEYS[11],
  usage = KEYS[12], suspects = KEYS[13], dead = KEYS[14],
}
local worker, lease_ms, max_attempts = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local retention_ms, nonce = tonumber(ARGV[4]), ARGV[5]
local output_weight, default_output = tonumber(ARGV[6]), tonumber(ARGV[7])
local DEAD_LENGTH, DEAD_VALUES = 10000, 2000
local now = now_ms()

-- The lease says that somebody holds the entry, the consumer says who.
local function is_ours(j, entry)
  if not redis.call('ZSCORE', k.leases, j.member) then return false end
  if not entry then return true end
  local pending = redis.pcall('XPENDING', k.queue[j.class], GROUP, j.entry, j.entry, 1)
  return not is_error(pending) and pending[1] ~= nil and pending[1][2] == worker
end

local function bury(j, entry, attempt, history)
  local copy = {'job', j.id, 'class', j.class, 'entry', j.entry, 'attempt', attempt, 'at', now,
    'history', history or '[]'}
  for i = 1, math.min(#entry[2], DEAD_VALUES) do copy[#copy + 1] = entry[2][i] end
  redis.pcall('XADD', k.dead, 'MAXLEN', '~', DEAD_LENGTH, '*', unpack(copy))
end

local function finish(j, entry, outcome, status, code)
  end_job(k, j, status, code, now, retention_ms)
  if entry and outcome ~= 'exhausted' then refund(k.vtime, j.class, entry[2], output_weight, default_output) end
  return {outcome, j.epoch + 1, 0, -1, j.seq + 1, j.submitted}
end

local function life_of(s_nonce)
  return (s_nonce or ''):match('^(.+)%.')
end

-- The deaths this job was part of, with the one that has brought it here again. Whoever ran it last and claims it
-- now, in the same life, did not die.
local function history_of(j, s)
  local history = s.history or nil
  local known = redis.call('HGET', k.suspects, j.member)
  local lived = life_of(nonce) and life_of(nonce) == life_of(s.nonce)
  if s.status == 'running' and not lived then
    local together = tonumber((known or '1'):match('^%d+')) or 1
    history = with_death(history, s.worker or '', j.epoch, j.seq, together, now)
    redis.call('HSET', j.job, 'history', history)
  end
  if known then redis.call('HDEL', k.suspects, j.member) end
  return history
end

local function run(j, s, entry, deadline)
  local attempt, epoch, e = number_or(s.attempt, 0) + 1, j.epoch + 1, estimate(entry[2], 1)
  if j.seq > 0 and s.t_start then bill(k, e.tenant, {'recomputed', j.prompt_tokens + j.seq}) end
  redis.call('HSET', j.job, 'status', 'running', 'epoch', epoch, 'attempt', attempt, 'seq', j.seq, 'worker', worker,
    'class', j.class, 'entry', j.entry, 'tenant', e.tenant, 't_submit', j.submitted,
    't_start', s.t_start or now, 'nonce', nonce, 'fence', string.format('%d %s', epoch, j.member))
  if deadline then redis.call('HSET', j.job, 'deadline', deadline) end
  if e.webhook then redis.call('HSET', j.job, 'webhook', e.webhook) end -- at the end the entry need not be read
  redis.call('PERSIST', j.job)
  redis.call('ZADD', k.leases, now + lease_ms, j.member)
  return {'run', epoch, attempt, deadline and deadline - now or -1, j.seq, j.submitted}
end

-- When the job's time is over; and the score of a job that was refused when it was sorted.
local function deadline_of(j, s, ttl_ms)
  local score = redis.pcall('ZSCORE', k.deadlines, j.member)
  score = not wrong_type(score) and number_or(score or nil, nil) or nil
  if score and score < 0 then return nil, score end
  return number_or(s.deadline, nil) or score or (ttl_ms > 0 and j.submitted + ttl_ms or nil)
end

local function claim(j, ttl_ms)
  local s = read_state(j, now)
  if not s then return {'error', 0, 0, -1, 0, 0} end
  local entry = redis.call('XRANGE', k.queue[j.class], j.entry, j.entry)[1]
  if not is_ours(j, entry) then return {'stale', j.epoch, 0, -1, j.seq, j.submitted} end
  if s.other or s.ended then
    remove_entry(k, j)
    return {s.other and 'duplicate' or 'ended', j.epoch, 0, -1, j.seq, j.submitted}
  end
  local deadline, refused = deadline_of(j, s, ttl_ms)
  if s.nonce == nonce then
    return {'run', j.epoch, number_or(s.attempt, 1), deadline and deadline - now or -1, j.seq, j.submitted}
  end
  if s.broken or not entry then return finish(j, entry, 'lost', 'failed', 'lost') end
  if flag(s.cancel) then return finish(j, entry, 'cancelled', 'cancelled') end
  if refused then return finish(j, nil, 'expired', 'failed', too_late(refused)) end -- it was never charged
  if deadline and deadline <= now then return finish(j, entry, 'expired', 'failed', 'deadline_exceeded') end
  local history = history_of(j, s)
  if deaths_alone(history) >= max_attempts then
    bury(j, entry, number_or(s.attempt, 0), history)
    return finish(j, entry, 'exhausted', 'failed', 'poison')
  end
  return run(j, s, entry, deadline)
end

local function claim_safely(j, ttl_ms)
  local found = redis.call('TYPE', k.queue[j.class]).ok
  if found ~= 'stream' and found ~= 'none' then return {'error', 0, 0, -1, 0, 0} end
  return claim(j, ttl_ms)
end

local out = {}
for i = 0, (#KEYS - 14) / 3 - 1 do
  local at, key = 8 + i * 4, 15 + i * 3
  local j = {job = KEYS[key], log = KEYS[key + 1], live = KEYS[key + 2]}
  j.class, j.entry, j.id = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  j.member = j.class .. '-' .. j.entry
  out[i + 1] = claim_safely(j, tonumber(ARGV[at + 3]))
  out[i + 1][7] = math.max(now - (j.submitted or now), 0)
end
return out
