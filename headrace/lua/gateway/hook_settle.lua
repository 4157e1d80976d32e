-- uses: base
-- Writes down an attempt and when to try next. ARGV: delivery id, attempts before this one, status, next delay ms,
-- attempt as JSON without its time and opening brace, most attempts kept. Returns "ok", "stale" or "gone".
local k = {delivery = KEYS[1], due = KEYS[2]}
local id, before, status, delay_ms, note, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local now = now_ms()
local s = redis.call('HMGET', k.delivery, 'status', 'attempts', 'history')
if not s[1] then
  redis.call('ZREM', k.due, id)
  return 'gone'
end
if s[1] ~= 'pending' or s[2] ~= before then return 'stale' end
local history, lines = (s[3] or '') .. string.format('{"at":%d,', now) .. note .. '\n', 0
for _ in history:gmatch('\n') do lines = lines + 1 end
if lines > most then history = history:gsub('^[^\n]*\n', '', 1) end
redis.call('HSET', k.delivery, 'status', status, 'attempts', number_or(before, 0) + 1, 'updated', now, 'history', history)
if status == 'pending' then
  redis.call('HSET', k.delivery, 'next', now + delay_ms)
  redis.call('ZADD', k.due, now + delay_ms, id)
else
  redis.call('HDEL', k.delivery, 'next')
  redis.call('ZREM', k.due, id)
end
return 'ok'
