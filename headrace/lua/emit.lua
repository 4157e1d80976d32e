-- Writes the events of one step of a whole batch: log, state and live channel of each job; with the last event also the
-- result, the expiry and the removal of the entry. Replaying a call that was carried out changes nothing.
-- ARGV: retention ms, then for each item: fence ("<epoch> <class>-<entry>"), prompt tokens, mode (0 more, 1 last, 2 last
-- whatever the log holds), number of events, for each event {seq, number of values, live JSON, values…}, and if last
-- {status, usage, result, error, 1 to keep the raw entry}.
-- Returns for each item a letter: o(k) c(ancel) s(tale) g(ap) l(ost) e(rror).
local k = {leases = KEYS[1], deadlines = KEYS[2], ids = KEYS[3], undecodable = KEYS[4], usage = KEYS[9], vtime = KEYS[10]}
k.queue, k.hooks = {high = KEYS[5], normal = KEYS[6], low = KEYS[7]}, KEYS[8] -- no library: this script is the hot one
local retention_ms, GROUP, UNDECODABLE_LENGTH = tonumber(ARGV[1]), 'workers', 10000
local HOOKS_LENGTH, HOOKS_TTL_MS, USAGE_FIELDS, USAGE_TTL_S = 100000, 604800000, 500000, 34560000
local at, now = 2, nil

local function now_ms()
  if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return now
end

-- WRONGTYPE concerns one item. Anything else (out of memory, read-only) concerns the server: the caller tries again.
local function failed(reply)
  if type(reply) ~= 'table' or not reply.err then return false end
  if not reply.err:find('WRONGTYPE', 1, true) then error(reply.err, 0) end
  return true
end

local function added(reply)
  if type(reply) ~= 'table' or not reply.err then return reply ~= false end
  if not reply.err:find('equal or smaller', 1, true) then error(reply.err, 0) end
  return false
end

local function skip(events, mode)
  for _ = 1, events do at = at + 3 + tonumber(ARGV[at + 1]) end
  if mode ~= '0' then at = at + 5 end
end

local function keep_raw(queue, entry)
  local found = redis.pcall('XRANGE', queue, entry, entry)
  local values = not found.err and found[1] and found[1][2]
  if not values then return end
  redis.pcall('XADD', k.undecodable, 'MAXLEN', '~', UNDECODABLE_LENGTH, '*', unpack(values, 1, math.min(#values, 2000)))
end

-- Whoever delivers webhooks learns of the end in the same change of state: neither can be without the other.
local function note_hook(j, status)
  local s = redis.call('HMGET', j.job, 'webhook', 'tenant')
  if not s[1] then return end
  redis.pcall('XADD', k.hooks, 'MAXLEN', '~', HOOKS_LENGTH, '*', 'job', j.job:match(':job:(.+)$'), 'url', s[1],
    'tenant', s[2] or 'default', 'status', status, 'at', now_ms())
  redis.pcall('PEXPIRE', k.hooks, HOOKS_TTL_MS)
end

-- How long a token takes and how many there are: what a deadline is compared with. Of jobs that ended well.
local function note_pace(j, output)
  local s = redis.call('HMGET', j.job, 't_start', 't_submit', 'deadline', 'late')
  local known = redis.pcall('HMGET', k.vtime, 'pace:token_ms', 'pace:output')
  local took = now_ms() - (tonumber(s[1] or '') or now_ms())
  if known.err or output == 0 then return end
  local function smooth(old, new)
    return string.format('%.6g', old and (tonumber(old) or new) * 0.9 + new * 0.1 or new)
  end
  redis.call('HSET', k.vtime, 'pace:token_ms', smooth(known[1], took / output), 'pace:output', smooth(known[2], output))
  if s[4] and now_ms() <= (tonumber(s[3] or '') or 0) then redis.call('HINCRBY', k.vtime, 'shadow:wrong', 1) end
end

-- The tenant's month, in the change of state that ends the job: every token is counted once.
local function bill(j, status, usage)
  local tenant = redis.call('HGET', j.job, 'tenant') or 'default'
  local function add(kind, number)
    return redis.pcall('HINCRBY', k.usage, tenant .. ':' .. kind, number or 0)
  end
  local length = redis.pcall('HLEN', k.usage)
  if type(length) ~= 'number' then return end
  if length > USAGE_FIELDS then tenant = '_other' end
  if add('jobs', 1) == 1 then redis.call('EXPIRE', k.usage, USAGE_TTL_S) end
  local output = tonumber(usage:match('"completion_tokens":(%d+)') or 0)
  add('prompt', usage:match('"prompt_tokens":(%d+)'))
  add('cached', usage:match('"cached_tokens":(%d+)'))
  add('output', output)
  if status ~= 'done' and output > 0 then add(status, output) end
  if status == 'done' then note_pace(j, output) end
end

local function close(j, fence, seq)
  local member = fence:match(' (.+)$')
  local class, entry = member:match('^(%l+)%-(.+)$')
  local status, usage, result, problem, raw = unpack(ARGV, at, at + 4)
  at = at + 5
  redis.call('HSET', j.job, 'status', status, 'seq', seq, 't_end', now_ms(), 'class', class, 'entry', entry)
  redis.call('HDEL', j.job, 'fence', 'nonce')
  if usage ~= '' then redis.call('HSET', j.job, 'usage', usage) end
  if result ~= '' then redis.call('HSET', j.job, 'result', result) end
  if problem ~= '' then redis.call('HSET', j.job, 'error', problem) end
  redis.call('PEXPIREAT', j.job, now_ms() + retention_ms)
  redis.call('PEXPIREAT', j.log, now_ms() + retention_ms)
  note_hook(j, status)
  bill(j, status, usage)
  if raw == '1' then keep_raw(k.queue[class], entry) end
  redis.pcall('XACK', k.queue[class], GROUP, entry)
  redis.pcall('XDEL', k.queue[class], entry)
  redis.pcall('ZREM', k.leases, member)
  redis.pcall('ZREM', k.deadlines, member)
  redis.pcall('HDEL', k.ids, member)
end

-- What became of a job that this epoch does not hold. Nil: its state is gone, and a forced end may write it anew.
local function fate(j, fence, mode, last_seq)
  local s = redis.pcall('HMGET', j.job, 'epoch', 'class', 'entry', 'status', 'seq')
  if failed(s) then return 'e' end
  if not s[1] or not s[4] then return mode ~= '2' and 'l' or nil end
  local same = s[1] .. ' ' .. (s[2] or '') .. '-' .. (s[3] or '') == fence
  local ended = s[4] == 'done' or s[4] == 'failed' or s[4] == 'cancelled'
  local replayed = mode == '2' or (mode == '1' and last_seq <= (tonumber(s[5]) or 0))
  return same and ended and replayed and 'o' or 's'
end

-- A damaged log is closed behind everything any reader can have seen.
local function write_end(j, seq)
  local tail = redis.pcall('XREVRANGE', j.log, '+', '-', 'COUNT', 1)
  if failed(tail) then redis.call('DEL', j.log) end
  local top = tail[1] and tonumber(tail[1][1]:match('^%d+')) or 0
  local wanted, values, json = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), ARGV[at + 2]
  seq = math.max(seq + 1, wanted, top + 1)
  local id = string.format('%d-0', seq)
  if not added(redis.pcall('XADD', j.log, id, unpack(ARGV, at + 3, at + 2 + values))) then
    redis.call('DEL', j.log) -- emptied by a stranger, with an id ahead of ours left behind
    redis.call('XADD', j.log, id, unpack(ARGV, at + 3, at + 2 + values))
  end
  at = at + 3 + values
  json = json:gsub('"seq":%d+', '"seq":' .. string.format('%d', seq), 1)
  redis.pcall('PUBLISH', j.live, json)
  return seq
end

-- The last seq written, or nil when the log refuses it (ids of a stranger are ahead of ours).
local function write(j, seq, events)
  local last = nil
  for _ = 1, events do
    local this, stop = ARGV[at], at + 2 + ARGV[at + 1]
    if tonumber(this) > seq then
      local reply
      if this == '1' then reply = redis.pcall('XADD', j.log, '1-0', unpack(ARGV, at + 3, stop))
      else reply = redis.pcall('XADD', j.log, 'NOMKSTREAM', this .. '-0', unpack(ARGV, at + 3, stop)) end
      if not added(reply) then return nil end
      redis.pcall('PUBLISH', j.live, ARGV[at + 2])
      last = this
    end
    at = stop + 1
  end
  return last or seq
end

local function first_event(j, prompt_tokens)
  redis.call('HSET', j.job, 'prompt_tokens', prompt_tokens)
  if ARGV[at + 4] == 'delta' then redis.call('HSET', j.job, 't_first', now_ms()) end
end

local function emit(j)
  local fence, prompt_tokens, mode, events = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  at = at + 4
  local begin, first = at, tonumber(ARGV[at])
  local s = redis.pcall('HMGET', j.job, 'fence', 'seq', 'cancel')
  local length = redis.pcall('XLEN', j.log)
  local refused = nil
  if s[1] ~= fence then refused = fate(j, fence, mode, first + events - 1)
  elseif mode ~= '2' and failed(length) then refused = 'e' end
  local seq = tonumber(s[2] or 0) or 0
  if not refused and mode == '2' then
    close(j, fence, write_end(j, seq))
    return 'o'
  end
  if not refused and first > seq + 1 then refused = 'g' end
  if not refused and length ~= seq then refused = 'l' end
  if refused then skip(events, mode) return refused end
  if seq == 0 then first_event(j, prompt_tokens) end
  local last = write(j, seq, events)
  if not last then
    at = begin
    skip(events, mode)
    return 'l'
  end
  if mode == '1' then close(j, fence, last) return 'o' end
  if last ~= seq then redis.call('HSET', j.job, 'seq', last) end
  local cancel = s[3]
  return cancel and cancel ~= '' and cancel ~= '0' and cancel ~= 'false' and 'c' or 'o'
end

local out, j = {}, {}
for i = 11, #KEYS, 3 do
  j.job, j.log, j.live = KEYS[i], KEYS[i + 1], KEYS[i + 2]
  out[#out + 1] = emit(j)
end
return table.concat(out)
