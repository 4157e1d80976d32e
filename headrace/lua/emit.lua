-- Writes the events of one step of a whole batch: log, state and live channel of each job; with the last event also the
-- result, the expiry and the removal of the entry. Replaying a call that was carried out changes nothing.
-- ARGV: retention ms, then for each item: id member, epoch, prompt tokens, mode (0 more, 1 last, 2 last whatever the log
-- holds), number of events, for each event {seq, number of values, live JSON, values…}, and if last {status, usage,
-- result, error, 1 to keep the raw entry}.
-- Returns for each item a letter: o(k) c(ancel) s(tale) g(ap) l(ost) e(rror).
local k = {leases = KEYS[1], deadlines = KEYS[2], ids = KEYS[3], undecodable = KEYS[4]}
k.queue = {high = KEYS[5], normal = KEYS[6], low = KEYS[7]}
local retention_ms, GROUP, UNDECODABLE_LENGTH = tonumber(ARGV[1]), 'workers', 10000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local at = 2

-- WRONGTYPE concerns one item. Anything else (out of memory, read-only) concerns the server, and the caller tries again.
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
  if mode > 0 then at = at + 5 end
end

local function keep_raw(queue, entry)
  local found = redis.pcall('XRANGE', queue, entry, entry)
  local values = not found.err and found[1] and found[1][2]
  if not values then return end
  redis.pcall('XADD', k.undecodable, 'MAXLEN', '~', UNDECODABLE_LENGTH, '*', unpack(values, 1, math.min(#values, 2000)))
end

local function close(j, seq)
  local class, entry = j.member:match('^(%l+)%-(.+)$')
  local status, usage, result, problem, raw = unpack(ARGV, at, at + 4)
  at = at + 5
  redis.call('HSET', j.job, 'status', status, 'seq', seq, 't_end', now, 'class', class, 'entry', entry)
  if usage ~= '' then redis.call('HSET', j.job, 'usage', usage) end
  if result ~= '' then redis.call('HSET', j.job, 'result', result) end
  if problem ~= '' then redis.call('HSET', j.job, 'error', problem) end
  redis.call('PEXPIREAT', j.job, now + retention_ms)
  redis.call('PEXPIREAT', j.log, now + retention_ms)
  if raw == '1' then keep_raw(k.queue[class], entry) end
  redis.pcall('XACK', k.queue[class], GROUP, entry)
  redis.pcall('XDEL', k.queue[class], entry)
  redis.pcall('ZREM', k.leases, j.member)
  redis.pcall('ZREM', k.deadlines, j.member)
  redis.pcall('HDEL', k.ids, j.member)
end

-- Whether this epoch may write, and the seq it goes on from.
local function refusal(j, s, epoch, mode, last_seq)
  local ended = s[2] == 'done' or s[2] == 'failed' or s[2] == 'cancelled'
  if not s[1] or not s[2] then return mode < 2 and 'l' or nil end
  if s[1] ~= epoch or (s[6] or '') .. '-' .. (s[5] or '') ~= j.member then return 's' end
  if ended then return mode > 0 and (mode == 2 or last_seq <= (tonumber(s[3]) or 0)) and 'o' or 's' end
  if s[2] ~= 'running' then return 's' end
end

-- A damaged log is closed behind everything any reader can have seen.
local function write_end(j, seq)
  local top = redis.call('XREVRANGE', j.log, '+', '-', 'COUNT', 1)[1]
  local wanted, values, json = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), ARGV[at + 2]
  seq = math.max(seq + 1, wanted, top and tonumber(top[1]:match('^%d+')) + 1 or 1)
  json = json:gsub('"seq":%d+', '"seq":' .. string.format('%d', seq), 1)
  local id = string.format('%d-0', seq)
  if not added(redis.pcall('XADD', j.log, id, unpack(ARGV, at + 3, at + 2 + values))) then
    redis.call('DEL', j.log) -- emptied by a stranger, with an id ahead of ours left behind
    redis.call('XADD', j.log, id, unpack(ARGV, at + 3, at + 2 + values))
  end
  at = at + 3 + values
  redis.pcall('PUBLISH', j.live, json)
  return seq
end

-- The last seq written, and whether the log refused one (ids of a stranger are ahead of ours).
local function write(j, seq, events)
  local broken = false
  for i = 1, events do
    local this, values = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
    if this > seq and not broken then
      local reply
      if this == 1 then reply = redis.pcall('XADD', j.log, '1-0', unpack(ARGV, at + 3, at + 2 + values))
      else reply = redis.pcall('XADD', j.log, 'NOMKSTREAM', ARGV[at] .. '-0', unpack(ARGV, at + 3, at + 2 + values)) end
      broken = not added(reply)
      if not broken then
        redis.pcall('PUBLISH', j.live, ARGV[at + 2])
        seq = this
      end
    end
    at = at + 3 + values
  end
  return seq, broken
end

local function first_event(j, prompt_tokens)
  redis.call('HSET', j.job, 'prompt_tokens', prompt_tokens)
  if ARGV[at + 4] == 'delta' then redis.call('HSET', j.job, 't_first', now) end
end

local function emit(j)
  local epoch, prompt_tokens, mode, events = ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  j.member = ARGV[at]
  at = at + 5
  local s = redis.pcall('HMGET', j.job, 'epoch', 'status', 'seq', 'cancel', 'entry', 'class')
  local length = redis.pcall('XLEN', j.log)
  if failed(s) or failed(length) then skip(events, mode) return 'e' end
  local seq, first_seq = tonumber(s[3] or 0) or 0, tonumber(ARGV[at])
  local refused = refusal(j, s, epoch, mode, first_seq + events - 1)
  if refused then skip(events, mode) return refused end
  if mode == 2 then
    close(j, write_end(j, seq))
    return 'o'
  end
  if first_seq > seq + 1 then skip(events, mode) return 'g' end
  if length ~= seq then skip(events, mode) return 'l' end
  if seq == 0 then first_event(j, prompt_tokens) end
  local last, broken = write(j, seq, events)
  if broken then
    if mode == 1 then at = at + 5 end
    return 'l'
  end
  if mode == 1 then close(j, last) return 'o' end
  if last > seq then redis.call('HSET', j.job, 'seq', last) end
  if s[4] and s[4] ~= '' and s[4] ~= '0' and s[4] ~= 'false' then return 'c' end
  return 'o'
end

local out = {}
for i = 8, #KEYS, 3 do
  out[#out + 1] = emit({job = KEYS[i], log = KEYS[i + 1], live = KEYS[i + 2]})
end
return table.concat(out)
