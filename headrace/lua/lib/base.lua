-- Time, numbers and names. Libraries name no key of their own: scripts pass them, and take them from KEYS alone.
local GROUP = 'workers'
local CLASSES = {'high', 'normal', 'low'}
local CLOCK_FLOOR_MS = 1500000000000 -- an entry id below this was chosen by its producer and tells no time
local CLOCK_SLACK_MS = 86400000 -- an entry id this far ahead is no time either, and blocks XADD behind it

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function exact(number)
  return string.format('%.17g', number)
end

local function is_error(reply)
  return type(reply) == 'table' and reply.err ~= nil
end

-- Passes every error on but WRONGTYPE, which concerns one key and not the server.
local function wrong_type(reply)
  if not is_error(reply) then return false end
  if reply.err:find('WRONGTYPE', 1, true) then return true end
  error(reply.err, 0)
end

local function number_or(text, otherwise)
  local n = tonumber(text or '')
  if not n or n ~= n or n < -1e15 or n > 1e15 then return otherwise end
  return n
end

local function flag(value)
  return value and value ~= '' and value ~= '0' and value ~= 'false'
end

local function id_ms(entry)
  return tonumber(entry:match('^%d+')) or 0
end

local function submitted_ms(entry, now)
  local ms = id_ms(entry)
  if ms > now or ms < CLOCK_FLOOR_MS then return now end
  return ms
end

local function split_member(member)
  local class, entry = member:match('^(%l+)%-(%d+%-%d+)$')
  if class == 'high' or class == 'normal' or class == 'low' then return class, entry end
end

-- Entries of all classes, waiting and running; and their bytes, if a ceiling of bytes asks for them.
local BYTE_SAMPLES = 10000 -- nodes; with the default of 5 small entries in front hide the large ones behind
local function held(queues, max_bytes)
  local entries, bytes = 0, 0
  for _, class in ipairs(CLASSES) do
    local queue = queues[class]
    local length = redis.pcall('XLEN', queue)
    entries = entries + (wrong_type(length) and 0 or length)
    if max_bytes > 0 then
      bytes = bytes + (redis.call('MEMORY', 'USAGE', queue, 'SAMPLES', BYTE_SAMPLES) or 0)
    end
  end
  return entries, bytes
end

-- Which ceiling is reached, if one is (0: none).
local function full_of(queues, max_entries, max_bytes)
  local entries, bytes = held(queues, max_bytes)
  return (max_entries > 0 and entries >= max_entries and 'entries') or (max_bytes > 0 and bytes >= max_bytes and 'bytes')
end

local function set_of(keys, first)
  return {high = keys[first], normal = keys[first + 1], low = keys[first + 2]}
end
