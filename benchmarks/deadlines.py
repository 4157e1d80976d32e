"""Shadow admission: how often `strict_deadline` would refuse a job that meets its deadline all the same.

`python -m benchmarks.deadlines --jobs 600`. A real redis-server and worker, simulated model. Every job has a
deadline and none is strict, so each runs, whatever the estimate at its submission says; what became of it
judges the estimate. Load comes in waves above and below what the worker can do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from benchmarks.processes import POOL, Fleet, Server
from headrace.client import Client
from headrace.connect import connect
from headrace.keys import Keys

STEP_MS, SLOTS = 10, 8
TOKENS = (20, 120)  # shortest and longest answer
TENANTS = 4
WAVE_S, HIGH, LOW = 6.0, 1.8, 0.5  # load as a share of what the worker can do
TTL = (0.5, 6.0)  # times the job's own duration


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the estimate said of one job, and what became of it."""

    late: bool  # a strict job would have been refused
    met: bool  # it ended well, within its time


def summary(verdicts: list[Verdict], told: dict[str, int]) -> dict[str, float]:
    """Counts and rates; `told` are the pool's own counters."""
    late = [v for v in verdicts if v.late]
    met = [v for v in verdicts if v.met]
    false_refusals = sum(v.late for v in met)
    missed = sum(not v.met and not v.late for v in verdicts)
    return {
        "jobs": len(verdicts),
        "met": len(met),
        "would_be_refused": len(late),
        "false_refusals": false_refusals,
        "false_refusal_rate": round(false_refusals / max(len(met), 1), 4),  # of jobs that meet their deadline
        "share_of_refusals_false": round(false_refusals / max(len(late), 1), 4),
        "missed_unforeseen": missed,
        "missed_unforeseen_rate": round(missed / max(len(verdicts) - len(met), 1), 4),  # of all that miss it
        **told,
    }


async def run_waves(client: Client, jobs: int, seed: int) -> list[str]:
    """Poisson arrivals; returns the job ids once all have ended."""
    rng = random.Random(seed)
    capacity = SLOTS / (sum(TOKENS) / 2 * STEP_MS / 1000)  # jobs a second
    ids: list[str] = []
    started_s = time.monotonic()
    for number in range(jobs):
        high = int((time.monotonic() - started_s) / WAVE_S) % 2 == 0
        await asyncio.sleep(rng.expovariate(capacity * (HIGH if high else LOW)))
        tokens = rng.randint(*TOKENS)
        ttl_ms = int(tokens * STEP_MS * rng.uniform(*TTL)) + 1
        fields: dict[str, Any] = {
            "max_tokens": tokens,
            "temperature": 0,
            "tenant": f"t{number % TENANTS}",
            "ttl_ms": ttl_ms,
        }
        ids.append(await client.submit(prompt=f"deadline {number}", **fields))
    for job_id in ids:
        await client.wait(job_id, 120)
    return ids


async def measure(url: str, jobs: int, seed: int) -> dict[str, float]:
    redis: Redis = connect(url)
    keys = Keys(POOL)
    async with Client(url, POOL) as client:
        warm = [
            await client.submit(prompt=f"warm {n}", max_tokens=60, temperature=0) for n in range(4 * SLOTS)
        ]
        for job_id in warm:
            await client.wait(job_id, 60)
        ids = await run_waves(client, jobs, seed)
    verdicts = []
    for job_id in ids:
        names = ["late", "status", "t_end", "deadline"]
        late, status, end_ms, until_ms = await redis.hmget(keys.job(job_id), names)  # type: ignore[misc]
        verdicts.append(Verdict(late is not None, status == b"done" and int(end_ms) <= int(until_ms)))
    counters = ["shadow:jobs", "shadow:late", "shadow:wrong"]
    counts = await redis.hmget(keys.vtime, counters)  # type: ignore[misc]
    await redis.aclose()
    return summary(verdicts, {name: int(count or 0) for name, count in zip(counters, counts, strict=True)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hr-deadlines-"))
    server = Server(shutil.which("redis-server") or "redis-server", folder)
    fleet = Fleet(server.url, f"simulated:step_ms={STEP_MS}", folder, SLOTS)
    try:
        server.start()
        fleet.add()
        with server.client() as client:
            fleet.wait_ready(client)
        print(json.dumps(asyncio.run(measure(server.url, args.jobs, args.seed)), indent=2))
    finally:
        fleet.stop()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
