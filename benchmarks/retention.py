"""Memory over many jobs: submitted, run and expired through the scripts, with a short retention.

`python -m benchmarks.retention --jobs 100000`. Prints used_memory as it goes, every key that has neither an
owner nor a TTL at the end, and what is left once the retention has passed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos import Server
from headrace.connect import connect
from headrace.keys import Keys
from headrace.messages import Choice, Delta, End, Event, Finish, Result, Usage
from headrace.script_types import EmitItem, Final
from headrace.scripts import Scripts

BATCH = 100
TEXT = "word " * 20
OWNED = ("vtime", "q:high", "q:normal", "q:low", "hooks", "workers", "usage:")


def item_of(entry: Any, claimed: Any) -> EmitItem:
    usage = Usage(prompt_tokens=4, completion_tokens=20, total_tokens=24)
    events: list[Event] = [Delta(seq=n, text="word ", ids=[n]) for n in range(1, 21)]
    ends: list[Event] = [Finish(seq=21, reason="length"), End(seq=22, status="done", usage=usage)]
    result = Result(choices=[Choice(index=0, text=TEXT, ids=list(range(20)), finish_reason="length")])
    final = Final("done", usage, result)
    return EmitItem(
        claimed.job_id,
        entry.job_class,
        entry.entry_id,
        claimed.epoch,
        events + ends,
        final,
        prompt_tokens=4,
    )


async def one_batch(scripts: Scripts, number: int, retention_ms: int) -> None:
    fields: dict[str, Any] = {"prompt": "measure", "max_tokens": 20}
    names = [f"job-{number}-{n}" for n in range(BATCH)]
    submitted = (
        scripts.submit("normal", name, fields, tenant=f"t{n % 50}", idem_key=name, idem_ttl_ms=retention_ms)
        for n, name in enumerate(names)
    )
    await asyncio.gather(*submitted)
    picked = await scripts.pick(f"w{number % 7}", BATCH, budget_tokens=1 << 40, lease_ms=60_000)
    items = [(e.job_class, e.entry_id, e.fields[b"id"].decode(), None) for e in picked.entries]
    claims = await scripts.claim(f"w{number % 7}", items, lease_ms=60_000, max_attempts=3)
    emitted = [item_of(entry, claim) for entry, claim in zip(picked.entries, claims, strict=True)]
    await scripts.emit(emitted, retention_ms=retention_ms)


async def measure(url: str, jobs: int, retention_ms: int) -> dict[str, Any]:
    redis, keys = connect(url), Keys("retention")
    scripts, memory = Scripts(redis, keys), []
    started_s = time.monotonic()
    every = max(jobs // BATCH // 20, 1)
    for number in range(jobs // BATCH):
        await one_batch(scripts, number, retention_ms)
        if number % every == 0:
            await scripts.reap(consumer_idle_ms=1000)
            memory.append((await redis.info("memory"))["used_memory"])
    took_s = time.monotonic() - started_s
    unowned = [name async for name in redis.scan_iter(count=1000) if await is_unowned(redis, keys, name)]
    await asyncio.sleep(retention_ms / 1000 + 1)
    for _ in range(5):
        await scripts.reap(consumer_idle_ms=100)
    left = sorted([name.decode() async for name in redis.scan_iter(count=1000)])
    memory.append((await redis.info("memory"))["used_memory"])
    await redis.aclose()
    return {
        "jobs": jobs,
        "jobs_per_s": round(jobs / took_s),
        "used_memory_mib": [round(m / 2**20, 1) for m in memory],
        "keys_without_owner_or_ttl": [name.decode() for name in unowned[:10]],
        "keys_left": left[:20],
    }


async def is_unowned(redis: Any, keys: Keys, name: bytes) -> bool:
    prefix = keys.queue("").removesuffix("q:")
    rest = name.decode().removeprefix(prefix)
    return await redis.pttl(name) == -1 and not rest.startswith(OWNED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--retention-ms", type=int, default=3000)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hr-retention-"))
    server = Server(shutil.which("redis-server") or "redis-server", folder)
    try:
        server.start()
        print(json.dumps(asyncio.run(measure(server.url, args.jobs, args.retention_ms)), indent=2))
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
