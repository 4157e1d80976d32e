-- Who may have killed a worker. When leases run out, all that their holder held is suspect, and is handed out again
-- apart from all others: in halves, then alone. `suspects` maps a member to "<how many ran together> <holder>".
local SUSPECTS_TTL_MS, MAX_TOGETHER, DUTY, HISTORY_LENGTH = 3600000, 1000, 'duty', 32

local function held_by(k, class, holder)
  local found = {}
  local pending = redis.pcall('XPENDING', k.queue[class], GROUP, '-', '+', MAX_TOGETHER, holder)
  if is_error(pending) then return found end
  for _, p in ipairs(pending) do
    local member = class .. '-' .. p[1]
    if redis.call('ZSCORE', k.leases, member) then found[#found + 1] = member end
  end
  return found
end

-- Notes that everything `holder` holds is suspect; what it held is known only until the first of it is handed out.
local function suspect_all(k, holder)
  local together = {}
  for _, class in ipairs(CLASSES) do
    for _, member in ipairs(held_by(k, class, holder)) do together[#together + 1] = member end
  end
  for _, member in ipairs(together) do
    redis.call('HSETNX', k.suspects, member, string.format('%d %s', #together, holder))
  end
  redis.call('PEXPIRE', k.suspects, SUSPECTS_TTL_MS)
end

-- {together, holder} of an entry under an expired lease, or nil if nobody ran it.
local function suspicion(k, class, id)
  local member = class .. '-' .. id
  local known = redis.call('HGET', k.suspects, member)
  if not known then
    local pending = redis.pcall('XPENDING', k.queue[class], GROUP, id, id, 1)
    local holder = not is_error(pending) and pending[1] and pending[1][2]
    if not holder or holder == 'ready' then return nil end
    suspect_all(k, holder)
    known = redis.call('HGET', k.suspects, member)
  end
  if not known then return nil end
  local together, holder = known:match('^(%d+) (.*)$')
  return {together = tonumber(together) or 1, holder = holder}
end

-- One worker at a time empties itself for suspects. True: it is this one.
local function take_duty(k, worker, now, lease_ms)
  local known = redis.call('HGET', k.suspects, DUTY)
  local until_ms, who = (known or ''):match('^(%d+) (.*)$')
  if who and who ~= worker and tonumber(until_ms) > now then return false end
  redis.call('HSET', k.suspects, DUTY, string.format('%.0f %s', now + lease_ms, worker))
  return true
end

-- A job's history: a JSON list of the deaths it was part of, made and changed as text.
local function death_of(worker, epoch)
  return string.format('{"worker":%s,"epoch":%d,', cjson.encode(worker), epoch)
end

local function with_death(history, worker, epoch, seq, together, now)
  local list = history and history:match('^%[(.+)%]$')
  local _, length = (list or ''):gsub('{"worker":', '')
  if length >= HISTORY_LENGTH then list = list:gsub('^{.-},{', '{', 1) end
  local death = death_of(worker, epoch) .. string.format('"seq":%d,"together":%d,"at":%.0f}', seq, together, now)
  return '[' .. (list and list .. ',' or '') .. death .. ']'
end

-- The history without one death, and whether it held it.
local function without_death(history, worker, epoch)
  local first, last = history:find(death_of(worker, epoch), 1, true)
  local stop = first and history:find('}', last, true)
  if not stop then return history, false end
  local left = history:sub(1, first - 1) .. history:sub(stop + 1)
  left = left:gsub('^%[,', '['):gsub(',%]$', ']'):gsub('},,{', '},{')
  return left, true
end

local function deaths_alone(history)
  return select(2, (history or ''):gsub('"together":1,', ''))
end
