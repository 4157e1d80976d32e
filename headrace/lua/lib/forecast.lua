-- How soon a job would be served, from what waits and from what the pool hands out while something waits.
-- In `vtime`: b:<class> is the cost that waits; pace:* the cost handed out under backlog, and the time that took.
local SHARE_OF_CLASS = {high = 16, normal = 4, low = 1}

local function pace(k)
  local p = redis.pcall('HMGET', k.vtime, 'pace:cost', 'pace:ms')
  if is_error(p) then return 0 end
  local cost, ms = number_or(p[1], 0), number_or(p[2], 0)
  return ms >= 100 and cost / ms or 0
end

-- Cost and number of the entries of a class that are sorted and wait, and how many are not sorted yet.
local function waiting(k, class)
  local count = redis.pcall('ZCARD', k.ready[class])
  local cost = redis.pcall('HGET', k.vtime, 'b:' .. class)
  local groups, behind = redis.pcall('XINFO', 'GROUPS', k.queue[class]), 0
  if is_error(count) or is_error(cost) then return 0, 0, 0 end
  if is_error(groups) or #groups == 0 then
    local length = redis.pcall('XLEN', k.queue[class])
    behind = is_error(length) and 0 or length
  else
    for _, group in ipairs(groups) do
      if group[2] == GROUP then behind = math.max(redis.call('XLEN', k.queue[class]) - group[6], 0) end
    end
  end
  return math.max(number_or(cost, 0), 0), count, behind
end

-- What a job of `class` and `tenant` has before it: {entries, cost, ms until it starts (nil: pace unknown)}.
-- `unsorted`: how many unsorted entries of its class are before it; all of them if not given.
local function forecast(k, class, tenant, own_cost, unsorted)
  local all_cost, shares, own = 0, 0, nil
  for _, name in ipairs(CLASSES) do
    local cost, count, behind = waiting(k, name)
    if name == class then behind = unsorted or behind end
    local mean = count > 0 and cost / count or own_cost
    cost = cost + behind * mean
    all_cost = all_cost + cost
    if name == class then own = {cost = cost, count = count, behind = behind, mean = mean} end
    if name == class or count + behind > 0 then shares = shares + SHARE_OF_CLASS[name] end
  end
  local clocks = redis.pcall('HMGET', k.vtime, 'v:' .. class, 'f:' .. class .. ':' .. tenant)
  local start = is_error(clocks) and 0 or math.max(number_or(clocks[1], 0), number_or(clocks[2], 0))
  local before = redis.pcall('ZCOUNT', k.ready[class], '-inf', exact(start))
  local entries = (is_error(before) and 0 or before) + own.behind
  local cost, rate = entries * own.mean, pace(k)
  if rate == 0 then return {entries = entries, cost = cost, all = all_cost, ms = entries == 0 and 0 or nil} end
  local at_least = cost / (rate * SHARE_OF_CLASS[class] / shares)
  return {entries = entries, cost = cost, all = all_cost, ms = math.min(at_least, all_cost / rate)}
end

-- ms that the job itself will take once it runs; nil while nothing has been measured.
local function duration(k, output)
  local m = redis.pcall('HMGET', k.vtime, 'pace:token_ms', 'pace:output')
  if is_error(m) or not m[1] then return nil end
  return number_or(m[1], 0) * math.min(output, math.max(number_or(m[2], output), 1))
end
