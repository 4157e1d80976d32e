-- uses: base
-- Extends the leases that are still this holder's. ARGV: lease ms, then {member, epoch} for each job.
-- Returns for each job a letter: o(k) c(ancel) l(ost).
local k = {leases = KEYS[1]}
local expiry = now_ms() + tonumber(ARGV[1])
local out = {}
for i = 2, #KEYS do
  local member, epoch = ARGV[i * 2 - 2], ARGV[i * 2 - 1]
  local s = redis.pcall('HMGET', KEYS[i], 'epoch', 'status', 'class', 'entry', 'cancel')
  if wrong_type(s) or s[1] ~= epoch or s[2] ~= 'running' or (s[3] or '') .. '-' .. (s[4] or '') ~= member then
    out[#out + 1] = 'l'
  else
    redis.call('ZADD', k.leases, expiry, member)
    out[#out + 1] = flag(s[5]) and 'c' or 'o'
  end
end
return table.concat(out)
