-- Ends a job from the server's side: terminal event, state, expiry and removal of its entry, all or nothing.
-- j: job, log, live (keys), class, entry, member, seq, epoch, prompt_tokens, submitted.

-- Drops what keeps the entry alive. The job's hash is the truth, so a failure here is made good by a later claim.
local function remove_entry(k, j)
  redis.pcall('XACK', k.queue[j.class], GROUP, j.entry)
  redis.pcall('XDEL', k.queue[j.class], j.entry)
  redis.pcall('ZREM', k.leases, j.member)
  redis.pcall('ZREM', k.deadlines, j.member)
  redis.pcall('ZREM', k.ready[j.class], j.entry)
  redis.pcall('HDEL', k.ids, j.member)
  redis.pcall('HDEL', k.suspects, j.member)
end

local function choice_of(choices, i)
  if not choices[i] then choices[i] = {text = {}, ids = {}, lp = {}, count = 0} end
  return choices[i]
end

local function append_list(list, json)
  local inner = json and json:match('^%s*%[(.*)%]%s*$')
  if not inner or not inner:find('%S') then return nil end
  list[#list + 1] = inner
  return inner
end

local function add_event(choices, fields)
  local f = {}
  for i = 1, #fields, 2 do f[fields[i]] = fields[i + 1] end
  local c = choice_of(choices, number_or(f.i, 0))
  if f.type == 'delta' then
    c.text[#c.text + 1] = f.text
    choices.cached = choices.cached or number_or(f.cached, 0)
    append_list(c.lp, f.lp)
    local ids = append_list(c.ids, f.ids)
    if ids then c.count = c.count + select(2, ids:gsub(',', '')) + 1 end
  elseif f.type == 'finish' then
    c.reason, c.stop = f.reason, f.stop
  end
end

local function choice_json(i, c)
  local parts = {'{"index":' .. i, '"text":' .. cjson.encode(table.concat(c.text))}
  parts[#parts + 1] = '"ids":[' .. table.concat(c.ids, ',') .. ']'
  if c.reason then parts[#parts + 1] = '"finish_reason":' .. cjson.encode(c.reason) end
  if c.stop then parts[#parts + 1] = '"stop":' .. c.stop end
  if #c.lp > 0 then parts[#parts + 1] = '"lp":[' .. table.concat(c.lp, ',') .. ']' end
  return table.concat(parts, ',') .. '}'
end

-- Usage and result, as JSON, of what the log holds.
local function partial(j)
  local choices, from = {}, '-'
  while j.seq > 0 do
    local page = redis.call('XRANGE', j.log, from, '+', 'COUNT', 500)
    for _, event in ipairs(page) do add_event(choices, event[2]) end
    if #page < 500 then break end
    from = '(' .. page[#page][1]
  end
  local order, list, tokens, cached = {}, {}, 0, choices.cached or 0
  choices.cached = nil
  for i in pairs(choices) do order[#order + 1] = i end
  table.sort(order)
  for _, i in ipairs(order) do
    list[#list + 1] = choice_json(i, choices[i])
    tokens = tokens + choices[i].count
  end
  local usage = string.format('{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"cached_tokens":%d}',
    j.prompt_tokens, tokens, j.prompt_tokens + tokens, cached)
  return usage, '{"choices":[' .. table.concat(list, ',') .. ']}'
end

-- Whoever delivers webhooks learns of the end in the same change of state: neither can be without the other.
local HOOKS_LENGTH, HOOKS_TTL_MS = 100000, 604800000

local function note_hook(k, j, status, now)
  local found = redis.pcall('XRANGE', k.queue[j.class], j.entry, j.entry)
  local e = not is_error(found) and found[1] and estimate(found[1][2], 1)
  local url = redis.call('HGET', j.job, 'webhook') or (e and e.webhook)
  if not url then return end
  local tenant = redis.call('HGET', j.job, 'tenant') or (e and e.tenant) or 'default'
  redis.pcall('XADD', k.hooks, 'MAXLEN', '~', HOOKS_LENGTH, '*', 'job', j.job:match(':job:(.+)$'), 'url', url,
    'tenant', tenant, 'status', status, 'at', now)
  redis.pcall('PEXPIRE', k.hooks, HOOKS_TTL_MS)
end

local USAGE_FIELDS, USAGE_TTL_S = 500000, 34560000

-- Adds {kind, number, …} to the tenant's month. A damaged ledger keeps no job from its end.
local function bill(k, tenant, counts)
  local length = redis.pcall('HLEN', k.usage)
  if is_error(length) then return end
  if length > USAGE_FIELDS then tenant = '_other' end
  for i = 1, #counts, 2 do
    local sum = redis.pcall('HINCRBY', k.usage, tenant .. ':' .. counts[i], counts[i + 1])
    if counts[i] == 'jobs' and sum == 1 then redis.call('EXPIRE', k.usage, USAGE_TTL_S) end
  end
end

local function bill_end(k, j, status, usage)
  local output = usage:match('"completion_tokens":(%d+)')
  bill(k, redis.call('HGET', j.job, 'tenant') or 'default', {'jobs', 1, 'prompt', j.prompt_tokens, 'output', output,
    'cached', usage:match('"cached_tokens":(%d+)'), status, output})
end

-- The error of a job that `pick` refused: the score of its deadline is minus the ms it would have taken.
local function too_late(score)
  local text = '{"code":"cannot_meet_deadline","message":"It would take about %.0f ms, longer than ttl_ms.",'
  return string.format(text .. '"retryable":true,"field":"ttl_ms"}', -score)
end

-- Raises the epoch, so that whoever held the job is fenced. `code`: of an error, or a whole error as JSON.
local function end_job(k, j, status, code, now, retention_ms)
  local usage, result = partial(j)
  local seq, problem = j.seq + 1, code and (ERRORS[code] or code)
  local event = {'type', 'end', 'status', status, 'usage', usage}
  local state = {'status', status, 'seq', seq, 'epoch', j.epoch + 1, 't_end', now, 'usage', usage,
    'result', result, 'class', j.class, 'entry', j.entry, 't_submit', j.submitted}
  local json = '{"type":"end","seq":' .. seq .. ',"status":"' .. status .. '","usage":' .. usage
  if problem then
    event[#event + 1], event[#event + 2] = 'error', problem
    state[#state + 1], state[#state + 2] = 'error', problem
    json = json .. ',"error":' .. problem
  end
  if is_error(redis.pcall('XADD', j.log, seq .. '-0', unpack(event))) then
    redis.call('DEL', j.log) -- emptied by a stranger, with an id ahead of ours left behind
    redis.call('XADD', j.log, seq .. '-0', unpack(event))
  end
  redis.call('HSET', j.job, unpack(state))
  redis.call('HDEL', j.job, 'fence', 'nonce')
  redis.call('PEXPIREAT', j.log, now + retention_ms)
  redis.call('PEXPIREAT', j.job, now + retention_ms)
  note_hook(k, j, status, now)
  bill_end(k, j, status, usage)
  remove_entry(k, j)
  redis.pcall('PUBLISH', j.live, json .. '}')
end

local STATE_FIELDS = {'status', 'seq', 'epoch', 'attempt', 'class', 'entry', 'cancel', 'deadline', 't_submit',
  'prompt_tokens', 'nonce', 't_start', 'worker', 'history'}

-- Reads a job's hash into j and the highest seq known of its log. False: one of its keys is of another type.
local function read_state(j, now)
  local values = redis.pcall('HMGET', j.job, unpack(STATE_FIELDS))
  local length = redis.pcall('XLEN', j.log)
  if wrong_type(values) or wrong_type(length) then return false end
  local s = {}
  for i, name in ipairs(STATE_FIELDS) do s[name] = values[i] end
  s.length = length
  j.epoch, j.seq = number_or(s.epoch, 0), number_or(s.seq, 0)
  j.submitted = number_or(s.t_submit, submitted_ms(j.entry, now))
  j.prompt_tokens = number_or(s.prompt_tokens, 0)
  s.other = s.status and (s.class ~= j.class or s.entry ~= j.entry)
  s.ended = s.status == 'done' or s.status == 'failed' or s.status == 'cancelled'
  local top = length > 0 and id_ms(redis.call('XREVRANGE', j.log, '+', '-', 'COUNT', 1)[1][1]) or 0
  s.broken = j.seq ~= length or j.seq ~= top
  j.seq = math.max(j.seq, top)
  return s
end
