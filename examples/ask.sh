#!/usr/bin/env bash
# Send a prompt with nothing but redis-cli, and print the answer as it comes.
#
#   examples/ask.sh "The sky is blue because" [max_tokens]
#   REDIS_CLI="redis-cli -h db -p 6379" POOL=smollm2 examples/ask.sh "…"
set -euo pipefail
prompt=${1:?usage: ask.sh PROMPT [MAX_TOKENS]}
read -ra cli <<<"${REDIS_CLI:-redis-cli -p 7379}"
pool=${POOL:-smollm2}

# The job's id is its class and the entry id that XADD returns.
entry=$("${cli[@]}" XADD "hr:{$pool}:q:normal" '*' prompt "$prompt" max_tokens "${2:-64}")
job="normal-$entry"
seq=0

# One field of an event. With --csv each value is quoted and escaped, so `","` separates. Empty if there is none.
field() {
  local rest=${event#*"\"$1\",\""}
  [ "$rest" != "$event" ] || return 0
  case $rest in
    *'","'*) rest=${rest%%\",\"*} ;;
    *) rest=${rest%\"} ;; # the last one
  esac
  printf "${rest//%/%%}" # takes the escapes back
}

while true; do
  event=$("${cli[@]}" --csv XREAD COUNT 1 BLOCK 0 STREAMS "hr:{$pool}:log:$job" "$seq-0")
  seq=$((seq + 1)) # the log has no gap: the n-th event's id is n-0
  case $(field type) in
    delta) [ "$(field i)" ] || field text ;; # choice 0: the others carry their index
    end) break ;;
  esac
done
echo
[ "$(field status)" = done ] || { field error >&2; exit 1; }
