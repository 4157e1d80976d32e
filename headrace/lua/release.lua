-- uses: base
-- Gives jobs back to the front of the queue without using up an attempt, and wakes idle workers.
-- ARGV: worker, then {class, entry, epoch} for each job; epoch 0: picked, not claimed. Returns the number given back.
local k = {queue = set_of(KEYS, 1), ready = set_of(KEYS, 4), leases = KEYS[7], ctl = KEYS[8]}
local worker = ARGV[1]

local function held_by_epoch(key, class, entry, epoch)
  local s = redis.pcall('HMGET', key, 'epoch', 'status', 'class', 'entry', 'attempt')
  if wrong_type(s) or s[1] ~= epoch or s[2] ~= 'running' or s[3] ~= class or s[4] ~= entry then return false end
  redis.call('HSET', key, 'status', 'queued', 'attempt', math.max(number_or(s[5], 1) - 1, 0), 'worker', '')
  redis.call('HDEL', key, 'fence', 'nonce')
  return true
end

local function held_by_lease(class, entry)
  local pending = redis.pcall('XPENDING', k.queue[class], GROUP, entry, entry, 1)
  if is_error(pending) or not pending[1] or pending[1][2] ~= worker then return false end
  return redis.call('ZSCORE', k.leases, class .. '-' .. entry) ~= false
end

local front = {}
local function front_of(class)
  if not front[class] then
    local head = redis.call('ZRANGE', k.ready[class], 0, 0, 'WITHSCORES')
    front[class] = exact(math.min(number_or(head[2], 0), 0) - 1)
  end
  return front[class]
end

local given = 0
for i = 9, #KEYS do
  local at = 2 + (i - 9) * 3
  local class, entry, epoch = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local usable = redis.call('TYPE', k.ready[class]).ok
  local ours = (usable == 'zset' or usable == 'none')
    and ((epoch == '0' and held_by_lease(class, entry)) or (epoch ~= '0' and held_by_epoch(KEYS[i], class, entry, epoch)))
  if ours then
    redis.call('ZADD', k.ready[class], front_of(class), entry)
    redis.call('ZREM', k.leases, class .. '-' .. entry)
    redis.pcall('XCLAIM', k.queue[class], GROUP, 'ready', 0, entry, 'FORCE', 'JUSTID')
    given = given + 1
  end
end
if given > 0 then redis.pcall('PUBLISH', k.ctl, 'ready') end
return given
