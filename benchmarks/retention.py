"""Memory over many jobs: submitted, run and expired through the scripts, with a short retention.

`python -m benchmarks.retention --jobs 100000`. Ten times on the way it lets everything expire and reads
`used_memory` at rest, so that the figure depends on what is left behind and not on this machine's pace.
Ends with 1 if the later half of these is more than 5 % above the earlier one, or if a key has neither an
owner nor a TTL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from redis.asyncio import Redis

from benchmarks.processes import Server
from headrace.connect import connect
from headrace.keys import Keys
from headrace.messages import Choice, Delta, End, Event, Finish, Result, Usage
from headrace.script_types import Claimed, EmitItem, Entry, Final
from headrace.scripts import Scripts

BATCH = 50
STAGES = 10
TENANTS = 50
TOKENS = 20
DELTAS = 5  # of so many tokens together, as a batch that says several tokens a step writes them
GROWTH = 1.05
# What a pool keeps while it lives, by the last part of its keys.
OWNED = ("vtime", "q:high", "q:normal", "q:low", "hooks", "workers")


def item_of(entry: Entry, claimed: Claimed) -> EmitItem:
    ids, each = list(range(TOKENS)), TOKENS // DELTAS
    events: list[Event] = [
        Delta(seq=n + 1, text="word " * each, ids=ids[n * each : (n + 1) * each]) for n in range(DELTAS)
    ]
    usage = Usage(prompt_tokens=4, completion_tokens=TOKENS, total_tokens=4 + TOKENS)
    events.append(Finish(seq=DELTAS + 1, reason="length"))
    events.append(End(seq=DELTAS + 2, status="done", usage=usage))
    result = Result(choices=[Choice(index=0, text="word " * TOKENS, ids=ids, finish_reason="length")])
    final = Final("done", usage, result)
    held = (claimed.job_id, entry.job_class, entry.entry_id, claimed.epoch)
    return EmitItem(*held, events, final, prompt_tokens=4)


async def run_batch(scripts: Scripts, number: int, retention_ms: int) -> None:
    """Submits, picks, claims and ends BATCH jobs, each with an idempotency key and some with a deadline."""
    for n in range(BATCH):
        fields: dict[str, Any] = {"prompt": "measure", "max_tokens": TOKENS}
        if n % 5 == 0:
            fields["ttl_ms"] = 600_000
        name = f"job-{number}-{n}"
        options: dict[str, Any] = {"tenant": f"t{n % TENANTS}", "idem_key": name, "idem_ttl_ms": retention_ms}
        await scripts.submit("normal", name, fields, **options)
    worker = f"w{number % 7}"
    picked = await scripts.pick(worker, BATCH, budget_tokens=1 << 40, lease_ms=60_000)
    items = [(e.job_class, e.entry_id, e.fields[b"id"].decode(), None) for e in picked.entries]
    claims = await scripts.claim(worker, items, lease_ms=60_000, max_attempts=3)
    pairs = zip(picked.entries, claims, strict=True)
    outcomes = await scripts.emit([item_of(*pair) for pair in pairs], retention_ms=retention_ms)
    if any(outcome.kind != "ok" for outcome in outcomes):
        raise RuntimeError(f"emit refused {outcomes}")


async def unowned(redis: Redis, keys: Keys) -> list[str]:
    """Keys that nobody would ever remove."""
    prefix = keys.queue("").removesuffix("q:")
    names = [name.decode() async for name in redis.scan_iter(count=1000)]
    async with redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.pttl(name)
        ttls = await pipe.execute()
    kept = [name for name, ttl in zip(names, ttls, strict=True) if ttl == -1]
    return [name for name in kept if name.removeprefix(prefix) not in OWNED]


async def rest(redis: Redis, scripts: Scripts, keys: Keys, retention_ms: int) -> int:
    """used_memory once everything has expired. Raises TimeoutError if a job never does."""
    end_s = time.monotonic() + 60
    while [name async for name in redis.scan_iter(match=keys.job("*"), count=1000)]:
        if time.monotonic() > end_s:
            raise TimeoutError("jobs that never expire")
        await asyncio.sleep(retention_ms / 4000)
    await scripts.reap(consumer_idle_ms=1)
    return int((await redis.info("memory"))["used_memory"])


async def measure(url: str, jobs: int, retention_ms: int) -> dict[str, Any]:
    redis, keys = connect(url), Keys("retention")
    scripts = Scripts(redis, keys)
    at_rest, highest, stray = [], 0, set[str]()
    batches, busy_s = max(jobs // BATCH, STAGES), 0.0
    for stage in range(STAGES):
        started_s = time.perf_counter()
        for number in range(batches * stage // STAGES, batches * (stage + 1) // STAGES):
            await run_batch(scripts, number, retention_ms)
        busy_s += time.perf_counter() - started_s
        highest = max(highest, int((await redis.info("memory"))["used_memory"]))
        stray.update(await unowned(redis, keys))
        at_rest.append(await rest(redis, scripts, keys, retention_ms))
    left = sorted([name.decode() async for name in redis.scan_iter(count=1000)])
    await redis.aclose()
    return {
        "jobs": batches * BATCH,
        "jobs_per_s": round(batches * BATCH / busy_s),
        "used_memory_highest_mib": round(highest / 2**20, 2),
        "used_memory_at_rest_mib": [round(memory / 2**20, 3) for memory in at_rest],
        "growth": round(median(at_rest[STAGES // 2 :]) / median(at_rest[: STAGES // 2]), 3),
        "keys_without_owner_or_ttl": sorted(stray)[:10],
        "keys_left": left,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--retention-ms", type=int, default=1000)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hr-retention-"))
    server = Server(shutil.which("redis-server") or "redis-server", folder)
    try:
        server.start()
        figures = asyncio.run(measure(server.url, args.jobs, args.retention_ms))
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(figures, indent=2))
    return int(figures["growth"] > GROWTH or bool(figures["keys_without_owner_or_ttl"]))


if __name__ == "__main__":
    sys.exit(main())
