"""Fair sharing under a flood: how long one tenant waits behind another's thousand jobs, and equals compared.

`python -m benchmarks.fair --jobs 1000`. A real redis-server and worker, simulated model. Ends with 1 if the
one tenant's p99 is above two service times, or Jain's index of the equals below 0.95.
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
from statistics import mean

from benchmarks.processes import POOL, Fleet, Server
from headrace.chaos import percentile
from headrace.client import Client, JobState

TOKENS = 40
EQUALS = 4
MOST_SERVICE_TIMES, LEAST_JAIN = 2.0, 0.95


async def submit(client: Client, tenant: str, number: int) -> str:
    return await client.submit(prompt=f"{tenant} {number}", tenant=tenant, max_tokens=TOKENS, temperature=0)


async def states(client: Client, ids: list[str]) -> list[JobState]:
    return [await client.wait(job_id, 120) for job_id in ids]


async def flood(client: Client, jobs: int, every_s: float) -> dict[str, float]:
    """One tenant has `jobs` waiting; another sends one each `every_s`."""
    flooding = [await submit(client, "flood", n) for n in range(jobs)]
    polite: list[str] = []
    last = flooding[-1]
    while not ((state := await client.poll(last)) and state.ended):
        polite.append(await submit(client, "polite", len(polite)))
        await asyncio.sleep(every_s)
    waits = [(s.t_start - s.t_submit) / 1000 for s in await states(client, polite)]
    service_s = mean((s.t_end - s.t_start) / 1000 for s in await states(client, flooding[:100]))
    return {
        "flood_jobs": jobs,
        "polite_jobs": len(polite),
        "service_s": round(service_s, 3),
        "polite_wait_p50_s": round(percentile(waits, 0.5), 3),
        "polite_wait_p90_s": round(percentile(waits, 0.9), 3),
        "polite_wait_p99_s": round(percentile(waits, 0.99), 3),
        "p99_in_service_times": round(percentile(waits, 0.99) / service_s, 2),
    }


async def equals(client: Client, jobs: int) -> dict[str, float]:
    """Jain's index over equal tenants, who arrive one flood after the other.

    What each was served from when the last had come until half of the rest was done.
    """
    tenants = [f"equal-{n}" for n in range(EQUALS)]
    ids = {tenant: [await submit(client, tenant, n) for n in range(jobs // EQUALS)] for tenant in tenants}
    done = {tenant: await states(client, own) for tenant, own in ids.items()}
    all_here = max(state.t_submit for own in done.values() for state in own)
    ends = {tenant: [s.t_end for s in own if s.t_start > all_here] for tenant, own in done.items()}
    ordered = sorted(t for own in ends.values() for t in own)
    half = ordered[len(ordered) // 2]
    shares = [sum(t <= half for t in own) for own in ends.values()]
    jain = sum(shares) ** 2 / (len(shares) * sum(s * s for s in shares))
    return {"equal_tenants": EQUALS, "jain_index": round(jain, 4)}


async def measure(url: str, jobs: int, every_s: float) -> dict[str, float]:
    async with Client(url, POOL) as client:
        return {**await flood(client, jobs, every_s), **await equals(client, jobs // 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--every-s", type=float, default=1.0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hr-fair-"))
    server = Server(shutil.which("redis-server") or "redis-server", folder)
    fleet = Fleet(server.url, "simulated:step_ms=5", folder, 8)
    try:
        server.start()
        fleet.add()
        with server.client() as client:
            fleet.wait_ready(client)
        started_s = time.monotonic()
        figures = asyncio.run(measure(server.url, args.jobs, args.every_s))
        print(json.dumps({**figures, "took_s": round(time.monotonic() - started_s, 1)}, indent=2))
    finally:
        fleet.stop()
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    unfair = figures["p99_in_service_times"] > MOST_SERVICE_TIMES or figures["jain_index"] < LEAST_JAIN
    return int(unfair)


if __name__ == "__main__":
    sys.exit(main())
