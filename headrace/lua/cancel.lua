-- uses: base cost ending
-- Sets a job's cancel flag; a job that still waits ends here. ARGV: id, retention ms, output weight, default output.
-- Returns "ended" (by this call), "flagged", "over" (it had ended) or "unknown" (the flag waits for the id).
local k = {
  queue = set_of(KEYS, 1), ready = set_of(KEYS, 4),
  vtime = KEYS[7], leases = KEYS[8], deadlines = KEYS[9], ids = KEYS[10], hooks = KEYS[11],
  usage = KEYS[12], suspects = KEYS[13], ctl = KEYS[14],
}
local id, retention_ms, now = ARGV[1], tonumber(ARGV[2]), now_ms()
local j = {job = KEYS[15], log = KEYS[16], live = KEYS[17]}
local UNKNOWN_TTL_MS = 86400000

local place = redis.call('HMGET', j.job, 'class', 'entry')
j.class, j.entry = place[1], place[2]
if not j.entry then j.class, j.entry = split_member(id) end
if j.entry then j.member = j.class .. '-' .. j.entry end

local s = j.entry and read_state(j, now)
if s and s.ended then return 'over' end
redis.call('HSET', j.job, 'cancel', 1)
redis.pcall('PUBLISH', k.ctl, 'cancel ' .. id)
if s and not s.broken and s.status ~= 'running' then
  local found = redis.pcall('XRANGE', k.queue[j.class], j.entry, j.entry)
  local entry = not is_error(found) and found[1]
  local same = entry and (s.status or (estimate(entry[2], 1).id or j.member) == id)
  if same and not redis.call('ZSCORE', k.leases, j.member) then
    local charged = redis.call('ZSCORE', k.ready[j.class], j.entry)
    end_job(k, j, 'cancelled', nil, now, retention_ms)
    if charged then refund(k.vtime, j.class, entry[2], tonumber(ARGV[3]), tonumber(ARGV[4]), true) end
    return 'ended'
  end
end
if s and s.status then return 'flagged' end
redis.call('PEXPIRE', j.job, UNKNOWN_TTL_MS)
return 'unknown'
