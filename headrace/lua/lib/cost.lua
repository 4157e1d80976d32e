-- What a submission will roughly cost, from its flat fields. Producers write these: every number is bounded here.
local MAX_NAME, MAX_URL = 64, 2048

local function bounded(text, low, high, otherwise)
  if not text or #text > 9 or not text:match('^%d+$') then return otherwise end
  return math.min(math.max(tonumber(text), low), high)
end

local function json_number(body, name)
  local _, at = body:find('"' .. name .. '"', 1, true)
  return at and body:match('^%s*:%s*(%d+)', at + 1)
end

local function msgpack_number(body, name)
  local _, at = body:find(string.char(0xa0 + #name) .. name, 1, true)
  local kind = at and body:byte(at + 1)
  if not kind then return nil end
  local width = ({[0xcc] = 1, [0xcd] = 2, [0xce] = 4})[kind]
  if kind < 0x80 then return tostring(kind) end
  if not width or #body < at + 1 + width then return nil end
  local n = 0
  for i = 1, width do n = n * 256 + body:byte(at + 1 + i) end
  return string.format('%.0f', n)
end

local function from_body(body, content_type, name)
  if content_type == 'application/msgpack' then return msgpack_number(body, name) end
  return json_number(body, name)
end

-- fields: flat list of names and values. Returns prompt and output tokens, n, tenant, the producer's id, ttl.
local function estimate(fields, default_output)
  local f, bytes = {}, 0
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    if f[name] == nil then f[name] = value end
    if name == 'prompt' or name == 'messages' or name == 'prompt_token_ids' or name == 'body' then
      bytes = bytes + #value
    end
  end
  local output, n = f.max_tokens or f.max_completion_tokens, f.n
  if f.body then
    output = output or from_body(f.body, f.ct, 'max_tokens') or from_body(f.body, f.ct, 'max_completion_tokens')
    n = n or from_body(f.body, f.ct, 'n')
  end
  local id, tenant = f.id, f.tenant
  if id and (#id > 128 or not id:match('^[%w._:-]+$')) then id = nil end
  if not tenant or #tenant > MAX_NAME or not tenant:match('^[%w._@-]+$') then tenant = 'default' end
  return {
    prompt = math.ceil(bytes / 4) + 1,
    output = bounded(output, 1, 1000000, default_output),
    n = bounded(n, 1, 128, 1),
    tenant = tenant,
    id = id,
    webhook = f.webhook and #f.webhook <= MAX_URL and f.webhook:match('^https?://[^%s/]%S*$') and f.webhook or nil,
    strict = f.strict_deadline == '1' or f.strict_deadline == 'true',
    ttl_ms = f.ttl_ms and #f.ttl_ms <= 10 and f.ttl_ms:match('^[1-9]%d*$') and tonumber(f.ttl_ms),
  }
end

local function cost_of(e, output_weight)
  return e.prompt + output_weight * e.output * e.n
end

-- Gives the tenant back what it was charged for a job that will not run. `waited`: it was not handed out yet.
local function refund(vtime_key, class, fields, output_weight, default_output, waited)
  local e = estimate(fields, default_output)
  if waited then redis.pcall('HINCRBYFLOAT', vtime_key, 'b:' .. class, -cost_of(e, output_weight)) end
  local clocks = redis.pcall('HMGET', vtime_key, 'f:' .. class .. ':' .. e.tenant, 'w:' .. e.tenant)
  if is_error(clocks) or not clocks[1] then return end
  local weight = math.min(math.max(number_or(clocks[2], 1), 0.001), 1000)
  local finish = number_or(clocks[1], 0) - cost_of(e, output_weight) / weight
  redis.pcall('HSET', vtime_key, 'f:' .. class .. ':' .. e.tenant, exact(finish))
end
