"""Send a prompt with the plain `redis` package (no Headrace installed), and print the answer as it comes.

python examples/ask.py "The sky is blue because"
"""

from __future__ import annotations

import os
import sys
from typing import Any

import redis


def ask(client: redis.Redis, pool: str, prompt: str) -> None:
    entry = client.xadd(f"hr:{{{pool}}}:q:normal", {"prompt": prompt, "max_tokens": 64})
    log, last = f"hr:{{{pool}}}:log:normal-{entry}", "0"
    while True:
        reply: Any = client.xread({log: last}, count=1, block=10_000)
        if not reply:
            continue  # an answer may be slow
        last, event = reply[0][1][0]
        if event["type"] == "delta" and event.get("i", "0") == "0":
            print(event["text"], end="", flush=True)
        elif event["type"] == "end":
            print()
            if event["status"] != "done":
                raise SystemExit(f"{event['status']}: {event.get('error', '')}")
            return


if __name__ == "__main__":
    url = os.environ.get("REDIS_URL", "redis://127.0.0.1:7379/0")
    with redis.Redis.from_url(url, decode_responses=True, socket_timeout=15) as connection:
        ask(connection, os.environ.get("POOL", "smollm2"), sys.argv[1])
