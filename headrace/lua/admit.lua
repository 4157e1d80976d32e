-- Takes requests and tokens from a tenant's two buckets, from both or from neither. A bucket holds a minute's worth and
-- fills evenly. What is larger than a bucket passes when it is full, and leaves a debt.
-- ARGV: requests, tokens, requests a minute, tokens a minute (0: no limit). Returns {1 or 0, ms until it would pass,
-- requests left, ms until that bucket is full, tokens left, ms until that bucket is full}.
local k = {rate = KEYS[1]}
local MINUTE_MS = 60000
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local s = redis.call('HMGET', k.rate, 'at', 'requests', 'tokens')
local gone_ms = math.max(now - (tonumber(s[1] or '') or 0), 0)

local function level(text, limit)
  return math.min((tonumber(text or '') or limit) + gone_ms * limit / MINUTE_MS, limit)
end

-- How long until `amount` can be taken.
local function wait_ms(have, amount, limit)
  if limit == 0 then return 0 end
  return math.ceil(math.max(math.min(amount, limit) - have, 0) * MINUTE_MS / limit)
end

local wanted = {tonumber(ARGV[1]), tonumber(ARGV[2])}
local limits = {tonumber(ARGV[3]), tonumber(ARGV[4])}
local levels = {level(s[2], limits[1]), level(s[3], limits[2])}
local retry_ms = 0
for i = 1, 2 do retry_ms = math.max(retry_ms, wait_ms(levels[i], wanted[i], limits[i])) end
if retry_ms == 0 then
  for i = 1, 2 do levels[i] = levels[i] - wanted[i] end
  redis.call('HSET', k.rate, 'at', now, 'requests', string.format('%.9g', levels[1]), 'tokens', string.format('%.9g', levels[2]))
  local full_ms = math.max(wait_ms(levels[1], limits[1], limits[1]), wait_ms(levels[2], limits[2], limits[2]))
  redis.call('PEXPIRE', k.rate, full_ms + MINUTE_MS) -- a full bucket need not be remembered
end
return {retry_ms == 0 and 1 or 0, retry_ms,
  math.max(math.floor(levels[1]), 0), wait_ms(levels[1], limits[1], limits[1]),
  math.max(math.floor(levels[2]), 0), wait_ms(levels[2], limits[2], limits[2])}
