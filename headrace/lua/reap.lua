-- uses: base cost ending
-- Ends what can never run and sweeps what nobody owns. Safe to call from anywhere, at any time.
-- ARGV: retention ms, consumer idle ms, stray ttl ms, output weight, default output, number of entries past their
-- deadline, number of jobs whose entry may be gone, then {class, entry} for each of both. After their keys come
-- job hashes that may be strays.
-- Returns {ended, consumers deleted, entries put back, clocks removed, strays}.
local k = {
  queue = set_of(KEYS, 1), ready = set_of(KEYS, 4),
  vtime = KEYS[7], leases = KEYS[8], deadlines = KEYS[9], ids = KEYS[10], hooks = KEYS[11],
  usage = KEYS[12], suspects = KEYS[13], workers = KEYS[14],
}
local retention_ms, consumer_idle_ms, stray_ttl_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local output_weight, default_output = tonumber(ARGV[4]), tonumber(ARGV[5])
local due, doubtful = tonumber(ARGV[6]), tonumber(ARGV[7])
local now, ended, deleted, restored, removed, strays = now_ms(), 0, 0, 0, 0, 0
local PAGE = 500

local function is_type(key, wanted)
  local found = redis.call('TYPE', key).ok
  return found == wanted
end

-- A job that runs under a live lease is its worker's business; all others past their deadline end here.
local function end_due(j)
  local score = redis.call('ZSCORE', k.deadlines, j.member)
  if not score or number_or(score, 0) > now then return end
  local lease = redis.call('ZSCORE', k.leases, j.member)
  if lease and number_or(lease, 0) > now then return end
  local s = read_state(j, now)
  if not s then return end
  ended = ended + 1
  if s.other or s.ended then return remove_entry(k, j) end
  local entry = is_type(k.queue[j.class], 'stream') and redis.call('XRANGE', k.queue[j.class], j.entry, j.entry)[1]
  local refused = number_or(score, 0) < 0
  local code = (s.broken and 'lost') or (refused and too_late(tonumber(score))) or 'deadline_exceeded'
  if flag(s.cancel) then end_job(k, j, 'cancelled', nil, now, retention_ms)
  else end_job(k, j, 'failed', code, now, retention_ms) end
  if entry and not refused then refund(k.vtime, j.class, entry[2], output_weight, default_output, not lease) end
end

-- A job that is neither leased nor waiting and whose entry is gone (its stream was deleted or trimmed) can never run.
local function end_orphan(j)
  if redis.call('ZSCORE', k.leases, j.member) then return end
  local waits = redis.pcall('ZSCORE', k.ready[j.class], j.entry)
  local entry = redis.pcall('XRANGE', k.queue[j.class], j.entry, j.entry)
  if waits or is_error(entry) or entry[1] then return end
  local s = read_state(j, now)
  if not s or not s.status or s.other or s.ended then return end
  end_job(k, j, 'failed', 'lost', now, retention_ms)
  ended = ended + 1
end

-- XGROUP DELCONSUMER drops what a consumer holds, so only those that hold nothing, in the same call.
local function delete_consumers(class)
  local groups = redis.pcall('XINFO', 'CONSUMERS', k.queue[class], GROUP)
  if is_error(groups) then return end
  for _, c in ipairs(groups) do
    local name, pending, idle = c[2], c[4], c[6]
    local card = redis.pcall('ZSCORE', k.workers, name)
    local alive = card and not is_error(card) and number_or(card, 0) > now
    if name ~= 'ready' and pending == 0 and idle >= consumer_idle_ms and not alive then
      redis.call('XGROUP', 'DELCONSUMER', k.queue[class], GROUP, name)
      deleted = deleted + 1
    end
  end
end

-- Entries delivered but neither waiting nor leased (a zset was deleted) go back to the front.
local function put_back(class)
  local cursor = 's:' .. class
  local from = redis.call('HGET', k.vtime, cursor) or '-'
  local page = redis.pcall('XPENDING', k.queue[class], GROUP, from, '+', PAGE)
  if is_error(page) then page = {} end
  for _, p in ipairs(page) do
    local waits = redis.call('ZSCORE', k.ready[class], p[1])
    if not waits and not redis.call('ZSCORE', k.leases, class .. '-' .. p[1]) then
      redis.call('ZADD', k.ready[class], 0, p[1])
      restored = restored + 1
    end
  end
  if #page < PAGE then redis.call('HDEL', k.vtime, cursor)
  else redis.call('HSET', k.vtime, cursor, '(' .. page[#page][1]) end
end

local function pending_total(class)
  local summary = redis.pcall('XPENDING', k.queue[class], GROUP)
  return is_error(summary) and 0 or summary[1]
end

local function sweep_pending()
  local pending, known, usable = 0, redis.call('ZCARD', k.leases), {}
  for _, class in ipairs(CLASSES) do
    local ready = redis.call('TYPE', k.ready[class]).ok
    if is_type(k.queue[class], 'stream') and (ready == 'zset' or ready == 'none') then
      usable[#usable + 1] = class
      pending = pending + pending_total(class)
      known = known + redis.call('ZCARD', k.ready[class])
    end
  end
  if pending <= known then return end
  for _, class in ipairs(usable) do put_back(class) end
end

-- A tenant's clock that the class's clock has passed says nothing any more.
local function remove_clocks()
  local page = redis.call('HSCAN', k.vtime, redis.call('HGET', k.vtime, 'scan') or '0', 'COUNT', PAGE)
  for i = 1, #page[2], 2 do
    local class = page[2][i]:match('^f:(%l+):')
    local passed = class and number_or(redis.call('HGET', k.vtime, 'v:' .. class), 0)
    if passed and number_or(page[2][i + 1], 0) <= passed then
      redis.call('HDEL', k.vtime, page[2][i])
      removed = removed + 1
    end
  end
  redis.call('HSET', k.vtime, 'scan', page[1])
end

for key, wanted in pairs({[k.leases] = 'zset', [k.deadlines] = 'zset', [k.vtime] = 'hash'}) do
  local found = redis.call('TYPE', key).ok
  if found ~= wanted and found ~= 'none' then return redis.error_reply('WRONGTYPE ' .. key) end
end
local first_stray = 15 + (due + doubtful) * 3
for i = 15, first_stray - 1, 3 do
  local number = (i - 15) / 3
  local at = 8 + number * 2
  local j = {job = KEYS[i], log = KEYS[i + 1], live = KEYS[i + 2], class = ARGV[at], entry = ARGV[at + 1]}
  j.member = j.class .. '-' .. j.entry
  if number < due then end_due(j) else end_orphan(j) end
end
for i = first_stray, #KEYS do
  local stray = redis.call('TYPE', KEYS[i]).ok == 'hash' and redis.call('HEXISTS', KEYS[i], 'status') == 0
  if stray and redis.call('PTTL', KEYS[i]) == -1 then
    redis.call('PEXPIRE', KEYS[i], stray_ttl_ms)
    strays = strays + 1
  end
end
for _, class in ipairs(CLASSES) do delete_consumers(class) end
sweep_pending()
if is_type(k.vtime, 'hash') then remove_clocks() end
return {ended, deleted, restored, removed, strays}
