-- uses: base cost forecast suspects
-- Sorts new entries into `ready` by start-time fair queueing (Goyal, Vin, Cheng 1996), then hands out expired leases
-- and up to n jobs, each under a lease. The class with the lowest weighted clock is next, so no class starves.
-- ARGV: worker, n, budget tokens, lease ms, sort limit, output weight, default output tokens, output reserve, how many
-- classes may be handed out, from the highest, 1 if the worker holds nothing, 1 if it missed a reply; then all that it
-- knows it holds: what else is under its lease is handed to it again.
-- Returns {{id to wait behind, for each class}, waiting, {names of unusable keys}, mode, {class, entry, {fields}}…}; mode 1:
-- these are suspects, to be run with nothing else; 2: suspects wait for this worker, that must give back what it holds.
local k = {
  queue = set_of(KEYS, 1), ready = set_of(KEYS, 4),
  vtime = KEYS[7], leases = KEYS[8], deadlines = KEYS[9], ids = KEYS[10], suspects = KEYS[13],
}
local worker, want, budget = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local lease_ms, sort_limit = tonumber(ARGV[4]), tonumber(ARGV[5])
local output_weight, default_output, reserve = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local open_class = {}
for i = 1, tonumber(ARGV[9]) do open_class[CLASSES[i]] = true end
local holds_nothing, missed_reply, mode = ARGV[10] == '1', ARGV[11] == '1', 0
local PACE_MS = 20000 -- over how long the pace is measured
local CLASS_WEIGHT = {high = 16, normal = 4, low = 1}
local READY_CONSUMER, SORT_BYTES, LAPSED = 'ready', 4194304, 10000
local now, bad, usable = now_ms(), {}, {}

local function is_type(key, wanted)
  local found = redis.call('TYPE', key).ok
  if found ~= wanted and found ~= 'none' then bad[#bad + 1] = key end
  return found == wanted or found == 'none', found ~= 'none'
end

if not is_type(k.leases, 'zset') then return redis.error_reply('WRONGTYPE ' .. k.leases) end
if not is_type(k.suspects, 'hash') then redis.call('DEL', k.suspects) end -- ours alone, and worth less than a job
local clocks_ok, ids_ok, deadlines_ok = is_type(k.vtime, 'hash'), is_type(k.ids, 'hash'), is_type(k.deadlines, 'zset')
for _, class in ipairs(CLASSES) do
  local queue_ok, exists = is_type(k.queue[class], 'stream')
  local ready_ok = is_type(k.ready[class], 'zset')
  usable[class] = queue_ok and ready_ok and {exists = exists} or nil
end

-- Clocks are read once and written back once.
local clocks, changed = {}, {}
local function clock(name, otherwise)
  if clocks[name] == nil then
    clocks[name] = number_or(clocks_ok and redis.call('HGET', k.vtime, name), otherwise or 0)
  end
  return clocks[name]
end
local function set_clock(name, value)
  clocks[name], changed[name] = value, true
end

local function save_clocks()
  local values = {}
  for name in pairs(changed) do
    values[#values + 1] = name
    values[#values + 1] = exact(clocks[name])
  end
  changed = {}
  if not clocks_ok then return end
  for i = 1, #values, 1000 do redis.call('HSET', k.vtime, unpack(values, i, math.min(i + 999, #values))) end
end

-- While nobody could reach the server nobody could renew. What ran out meanwhile tells of no death until its holder has
-- had time to speak: the outage would make a suspect of every job in the pool. Time is given once, or a server that is
-- away again and again would never let go of a dead worker's jobs: such a lease ends within a millisecond, at its half.
local function after_silence()
  if lease_ms > 1 and lease_ms ~= clock('lease') then set_clock('lease', lease_ms) end
  local seen, usual_ms = clock('seen'), clock('lease')
  if now - seen >= usual_ms / 8 or now < seen then set_clock('seen', now) end
  if seen == 0 or now - seen <= usual_ms / 2 then return end
  local lapsed = redis.call('ZRANGEBYSCORE', k.leases, exact(seen), now, 'WITHSCORES', 'LIMIT', 0, LAPSED)
  for i = 1, #lapsed, 2 do
    local given = tonumber(lapsed[i + 1]) % 1 ~= 0
    if not given then redis.call('ZADD', k.leases, math.ceil(now + usual_ms / 2) + 0.5, lapsed[i]) end
  end
end

-- The ms from submission to end of a job that would not be in time and asked to be refused then.
local function too_long_ms(class, id, e)
  if not e.strict or not clocks_ok then return nil end
  save_clocks()
  local ahead = forecast(k, class, e.tenant, cost_of(e, output_weight), 0)
  local takes_ms = ahead.ms and duration(k, e.output)
  local all_ms = takes_ms and now - submitted_ms(id, now) + ahead.ms + takes_ms
  return all_ms and all_ms > e.ttl_ms and math.ceil(all_ms) or nil
end

-- One that is refused is not queued; its negative deadline, which is over at once, says how long it would have taken.
local function note_deadline(class, id, member, e)
  if not e.ttl_ms or not deadlines_ok then return true end
  local all_ms = too_long_ms(class, id, e)
  redis.call('ZADD', k.deadlines, 'NX', all_ms and -all_ms or submitted_ms(id, now) + e.ttl_ms, member)
  return not all_ms
end

local function sort_entry(class, id, fields)
  local member = class .. '-' .. id
  if redis.call('ZSCORE', k.leases, member) then return end -- the group was made anew while it runs
  local e = estimate(fields, default_output)
  if e.id and e.id ~= member and ids_ok then redis.call('HSET', k.ids, member, e.id) end
  if not note_deadline(class, id, member, e) then return end
  local finish = 'f:' .. class .. ':' .. e.tenant
  local start = math.max(clock('v:' .. class), clock(finish))
  local weight = math.min(math.max(clock('w:' .. e.tenant, 1), 0.001), 1000)
  set_clock(finish, start + cost_of(e, output_weight) / weight)
  set_clock('m:' .. class, math.max(clock('m:' .. class), clock(finish)))
  set_clock('b:' .. class, clock('b:' .. class) + cost_of(e, output_weight))
  redis.call('ZADD', k.ready[class], 'NX', exact(start), id)
end

-- Makes a queue anew without some of its entries, so that its next id may be behind theirs: a stream remembers from
-- Redis 7.2 on what was deleted from it, and does not go back behind that. False: an entry is too long for a script.
local function remake(queue, without, last)
  local kept, left_out = {}, {}
  for _, entry in ipairs(without) do left_out[entry[1]] = true end
  for _, entry in ipairs(redis.call('XRANGE', queue, '-', '+')) do
    if #entry[2] >= 4000 then return false end
    if not left_out[entry[1]] then kept[#kept + 1] = entry end
  end
  local held = redis.call('XPENDING', queue, GROUP, '-', '+', redis.call('XPENDING', queue, GROUP)[1])
  redis.call('DEL', queue)
  redis.call('XGROUP', 'CREATE', queue, GROUP, '0', 'MKSTREAM')
  for _, entry in ipairs(kept) do redis.call('XADD', queue, entry[1], unpack(entry[2])) end
  for _, each in ipairs(held) do
    redis.call('XCLAIM', queue, GROUP, each[2], 0, each[1], 'FORCE', 'JUSTID')
  end
  redis.call('XSETID', queue, last)
  return true
end

-- Entries with ids far in the future stop every later XADD: they are submitted again, under the job id they had.
local function move_back(class, far)
  local queue = k.queue[class]
  local top = redis.call('XREVRANGE', queue, '+', '-', 'COUNT', #far + 1)[#far + 1]
  if top and id_ms(top[1]) > now + CLOCK_SLACK_MS then return false end
  local last = (top and id_ms(top[1]) >= now) and top[1] or (exact(now) .. '-0')
  if not remake(queue, far, last) then return false end
  redis.call('XGROUP', 'SETID', queue, GROUP, last)
  for _, entry in ipairs(far) do
    local fields = entry[2]
    if not estimate(fields, 1).id then
      table.insert(fields, 1, class .. '-' .. entry[1])
      table.insert(fields, 1, 'id')
    end
    redis.call('XADD', queue, '*', unpack(fields))
  end
  return true
end

local function read_new(class, count)
  local function read()
    return redis.pcall('XREADGROUP', 'GROUP', GROUP, READY_CONSUMER, 'COUNT', count, 'STREAMS', k.queue[class], '>')
  end
  local reply = read()
  if is_error(reply) and reply.err:find('NOGROUP', 1, true) then
    redis.call('XGROUP', 'CREATE', k.queue[class], GROUP, '0')
    reply = read()
  end
  if is_error(reply) then error(reply.err, 0) end
  return reply and reply[1][2] or {}
end

local function sort_class(class)
  local room, bytes = sort_limit, 0
  while room > 0 and bytes < SORT_BYTES do
    local batch, far = read_new(class, math.min(room, 32)), {}
    if #batch > 0 and redis.call('ZCARD', k.ready[class]) == 0 then
      set_clock('v:' .. class, math.max(clock('v:' .. class), clock('m:' .. class)))
    end
    for _, entry in ipairs(batch) do
      local small = #entry[2] < 4000
      if small and id_ms(entry[1]) > now + CLOCK_SLACK_MS then far[#far + 1] = entry
      else sort_entry(class, entry[1], entry[2]) end
      for i = 2, math.min(#entry[2], 4000), 2 do bytes = bytes + #entry[2][i] end
    end
    if #far > 0 and not move_back(class, far) then
      for _, entry in ipairs(far) do sort_entry(class, entry[1], entry[2]) end
    end
    room = room - #batch
    if #batch == 0 then return end
  end
end

local picked = {}
-- A lost entry (trimmed or deleted by a stranger) is handed out without fields: claim ends its job.
local function hand_out(class, id)
  local member = class .. '-' .. id
  local found = redis.pcall('XRANGE', k.queue[class], id, id)
  if is_error(found) then -- no entry id at all: somebody else's member
    redis.call('ZREM', k.leases, member)
    return 0
  end
  local entry = found[1]
  local fields = entry and entry[2] or {}
  redis.call('ZADD', k.leases, now + lease_ms, member)
  if entry then
    redis.call('XCLAIM', k.queue[class], GROUP, worker, 0, id, 'FORCE', 'JUSTID')
  else
    local own = ids_ok and redis.call('HGET', k.ids, member)
    if own then fields = {'id', own} end
  end
  picked[#picked + 1] = {class, id, fields, entry and 0 or 1}
  local e = estimate(fields, default_output)
  budget = budget - e.prompt - math.min(e.output, reserve) * e.n
  return cost_of(e, output_weight)
end

local function open()
  return #picked < want and budget > 0
end

-- Suspects go out together only if they ran together, half as many as then, and to a worker that holds nothing.
local company = nil
local function take_one(class, id)
  local s = suspicion(k, class, id)
  if not s then
    if mode == 0 then hand_out(class, id) end
  elseif not holds_nothing then
    if take_duty(k, worker, now, lease_ms) then mode = 2 end
  elseif not company and #picked == 0 then
    company, mode = {holder = s.holder, together = s.together, left = math.ceil(s.together / 2) - 1}, 1
    hand_out(class, id)
  elseif company and company.left > 0 and company.holder == s.holder and company.together == s.together then
    company.left = company.left - 1
    hand_out(class, id)
  end
end

-- What was handed out by a call whose reply was lost, or picked before a claim that failed.
local function take_again()
  local known = {}
  for i = 12, #ARGV do known[ARGV[i]] = true end
  for _, class in ipairs(CLASSES) do
    local pending = usable[class] and usable[class].exists and open_class[class]
      and redis.pcall('XPENDING', k.queue[class], GROUP, '-', '+', MAX_TOGETHER, worker)
    for _, p in ipairs(pending and not is_error(pending) and pending or {}) do
      local member = class .. '-' .. p[1]
      if not open() then return end
      if not known[member] and redis.call('ZSCORE', k.leases, member) then
        if redis.call('HEXISTS', k.suspects, member) == 1 then take_one(class, p[1]) else hand_out(class, p[1]) end
      end
      if mode == 2 then return end
    end
  end
end

local function take_expired()
  local expired = redis.call('ZRANGEBYSCORE', k.leases, '-inf', now, 'LIMIT', 0, want + 100)
  for _, member in ipairs(expired) do
    if not open() then return end
    local class, id = split_member(member)
    if not class then redis.call('ZREM', k.leases, member)
    elseif usable[class] and open_class[class] then take_one(class, id) end
    if mode == 2 then return end
  end
end

local function next_class()
  local best, best_clock, best_head
  for _, class in ipairs(CLASSES) do
    local head = usable[class] and open_class[class] and redis.call('ZRANGE', k.ready[class], 0, 0, 'WITHSCORES')
    if head and head[1] then
      local c = math.max(clock('c:' .. class), clock('c'))
      if not best or c < best_clock then best, best_clock, best_head = class, c, head end
    end
  end
  return best, best_clock, best_head
end

local handed_cost = 0
local function take_ready()
  while open() do
    local class, class_clock, head = next_class()
    if not class then return end
    redis.call('ZREM', k.ready[class], head[1])
    set_clock('v:' .. class, math.max(clock('v:' .. class), number_or(head[2], 0)))
    set_clock('c', class_clock)
    local cost = hand_out(class, head[1])
    handed_cost = handed_cost + cost
    set_clock('b:' .. class, math.max(clock('b:' .. class) - cost, 0))
    set_clock('c:' .. class, class_clock + cost / CLASS_WEIGHT[class])
  end
end

after_silence()
for _, class in ipairs(CLASSES) do
  if usable[class] and usable[class].exists then sort_class(class) end
end
if want > 0 then
  if missed_reply then take_again() end
  if mode ~= 2 then take_expired() end
  if mode == 0 then take_ready() end
end

-- Only time with something waiting tells how much the pool can do: else it waits for its producers.
local function note_pace()
  local left = false
  for _, class in ipairs(CLASSES) do
    local some = usable[class] and redis.call('ZCARD', k.ready[class]) > 0
    left = left or some
    if not some and clock('b:' .. class) ~= 0 then set_clock('b:' .. class, 0) end
  end
  if clock('pace:at') > 0 then
    local passed = math.max(now - clock('pace:at'), 0)
    local kept = math.exp(-passed / PACE_MS)
    set_clock('pace:cost', clock('pace:cost') * kept + handed_cost)
    set_clock('pace:ms', clock('pace:ms') * kept + passed)
  end
  local at = left and now or 0
  if at ~= clock('pace:at') then set_clock('pace:at', at) end
end
if want > 0 then note_pace() end

save_clocks()

local behind, waiting = {}, 0
for i, class in ipairs(CLASSES) do
  behind[i] = '0-0'
  if usable[class] and usable[class].exists then
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', k.queue[class])) do
      if group[2] == GROUP then
        behind[i] = group[8]
        waiting = waiting + math.max(redis.call('XLEN', k.queue[class]) - group[6], 0)
      end
    end
  end
  if usable[class] then waiting = waiting + redis.call('ZCARD', k.ready[class]) end
end
return {behind, waiting, bad, mode, unpack(picked)}
