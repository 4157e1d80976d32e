"""The self-check of `headrace up`: one prompt through the queue, as any producer would send it."""

from __future__ import annotations

import time

from headrace.cli.screen import PROMPT
from headrace.client import Client
from headrace.messages import Delta, End

MAX_TOKENS = 24
TIMEOUT_MS = 120_000


async def answer_one_prompt(redis_url: str, pool: str) -> str:
    """One line with the answer and its speed. Raises RuntimeError when the job fails."""
    client = Client(redis_url, pool)
    began_s = time.monotonic()
    first_s, ids, text = 0.0, 0, ""
    try:
        job_id = await client.submit(
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            ttl_ms=TIMEOUT_MS,
        )
        async for event in client.follow(job_id):
            if isinstance(event, Delta):
                first_s = first_s or time.monotonic() - began_s
                ids += len(event.ids)
                text += event.text
            elif isinstance(event, End) and event.status != "done":
                raise RuntimeError(str((event.error or {}).get("message", event.status)))
    finally:
        await client.close()
    total_s = time.monotonic() - began_s
    return (
        f"“{PROMPT}” → “{text.strip()}…” ({ids} tokens in {total_s:.2f} s, the first after {first_s:.2f} s)"
    )
