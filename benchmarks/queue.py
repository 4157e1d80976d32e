"""The scripts' cost: tokens a second through `emit`, and a claim on an empty and on a very long queue.

`python -m benchmarks.queue --waiting 100000`. A redis-server of its own; CPU time of the server and of us.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import Server
from headrace.connect import connect
from headrace.keys import Keys
from headrace.messages import Delta
from headrace.script_types import Claimed, EmitItem, Entry
from headrace.scripts import Scripts

LEASE_MS = 600_000
STEPS = {1: 2000, 32: 300, 256: 60}


async def take(scripts: Scripts, count: int) -> list[tuple[Entry, Claimed]]:
    picked = await scripts.pick("w", count, budget_tokens=1 << 40, lease_ms=LEASE_MS, sort_limit=512)
    items = [(e.job_class, e.entry_id, e.member, None) for e in picked.entries]
    claims = await scripts.claim("w", items, lease_ms=LEASE_MS, max_attempts=3)
    return list(zip(picked.entries, claims, strict=True))


async def add(redis: Any, keys: Keys, count: int) -> None:
    for start in range(0, count, 1000):
        async with redis.pipeline(transaction=False) as pipe:
            for n in range(start, min(start + 1000, count)):
                pipe.xadd(
                    keys.queue("normal"), {"prompt": "x" * 40, "max_tokens": 64, "tenant": f"t{n % 20}"}
                )
            await pipe.execute()


async def cpu_s(redis: Any) -> tuple[float, float]:
    server, own = await redis.info("cpu"), resource.getrusage(resource.RUSAGE_SELF)
    return server["used_cpu_sys"] + server["used_cpu_user"], own.ru_utime + own.ru_stime


async def egress(redis: Any, scripts: Scripts, keys: Keys, batch: int) -> dict[str, Any]:
    await add(redis, keys, batch)
    jobs, steps = await take(scripts, batch), STEPS[batch]
    server_s, own_s = await cpu_s(redis)
    started_s = time.perf_counter()
    for seq in range(1, steps + 1):
        events = [Delta(seq=seq, text=" word", ids=[1000 + seq])]
        items = [EmitItem(c.job_id, e.job_class, e.entry_id, c.epoch, events) for e, c in jobs]
        outcomes = await scripts.emit(items)
        if any(outcome.kind != "ok" for outcome in outcomes):
            raise RuntimeError(str(outcomes[0]))
    took_s, tokens = time.perf_counter() - started_s, steps * batch
    server_end_s, own_end_s = await cpu_s(redis)
    return {
        "batch": batch,
        "tokens_per_s": round(tokens / took_s),
        "server_us_per_token": round((server_end_s - server_s) / tokens * 1e6, 1),
        "client_us_per_token": round((own_end_s - own_s) / tokens * 1e6, 1),
    }


async def claims(scripts: Scripts, count: int = 100) -> float:
    """Median ms of a pick and claim of one job."""
    times = []
    for _ in range(count):
        started_s = time.perf_counter()
        await take(scripts, 1)
        times.append((time.perf_counter() - started_s) * 1000)
    return round(median(times), 3)


async def measure(url: str, waiting: int) -> dict[str, Any]:
    redis = connect(url)
    found: dict[str, Any] = {"emit": []}
    for batch in STEPS:
        keys = Keys(f"emit-{batch}")
        found["emit"].append(await egress(redis, Scripts(redis, keys), keys, batch))
    for name, count in (("claim_ms_of_200_waiting", 200), (f"claim_ms_of_{waiting}_waiting", waiting)):
        keys = Keys(f"claims-{count}")
        scripts = Scripts(redis, keys)
        await add(redis, keys, count)
        for _ in range(count // 512 + 1):
            await scripts.pick("w", 0, budget_tokens=0, lease_ms=1, sort_limit=512)
        found[name] = await claims(scripts)
    await redis.aclose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--waiting", type=int, default=100_000)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hr-queue-"))
    server = Server(shutil.which("redis-server") or "redis-server", folder)
    try:
        server.start()
        print(json.dumps(asyncio.run(measure(server.url, args.waiting)), indent=2))
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
