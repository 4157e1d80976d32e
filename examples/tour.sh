#!/usr/bin/env bash
# One-liners for redis-cli and curl; paste what you need. `headrace up` serves Redis on port 7379 and HTTP on 8080.
set -euo pipefail
pool=${POOL:-smollm2}
read -ra cli <<<"${REDIS_CLI:-redis-cli -p 7379}"
url=${URL:-http://127.0.0.1:8080}
auth=(${KEY:+-H "Authorization: Bearer $KEY"})

# Submit under an id of your own, ahead of the normal jobs, with 30 seconds to live.
id="example-$$-$RANDOM"
"${cli[@]}" XADD "hr:{$pool}:q:high" '*' id "$id" prompt 'Once upon a time' max_tokens 32 seed 7 ttl_ms 30000

# Wait for its end: the log's last event.
seq=0
until "${cli[@]}" XREAD COUNT 1 BLOCK 0 STREAMS "hr:{$pool}:log:$id" "$seq-0" | grep -qx end; do seq=$((seq + 1)); done

# Poll: state, usage and the whole result.
"${cli[@]}" HMGET "hr:{$pool}:job:$id" status usage result

# Cancel, at any time; the second line only makes it quicker.
"${cli[@]}" HSET "hr:{$pool}:job:$id" cancel 1 >/dev/null
"${cli[@]}" PUBLISH "hr:{$pool}:ctl" "cancel $id" >/dev/null

# The same model over HTTP, as OpenAI's API.
curl -sS "$url/v1/completions" "${auth[@]}" -H 'Content-Type: application/json' \
  -d '{"model": "'"$pool"'", "prompt": "Once upon a time", "max_tokens": 32, "seed": 7}'
echo
curl -sSN "$url/v1/chat/completions" "${auth[@]}" -H 'Content-Type: application/json' \
  -d '{"model": "'"$pool"'", "stream": true, "max_tokens": 32, "messages": [{"role": "user", "content": "Say hello."}]}'
