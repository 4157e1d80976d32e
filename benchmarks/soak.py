"""A long run past capacity: mixed jobs, cancels, invalid ones; each has exactly one end, nothing leaks.

`python -m benchmarks.soak --jobs 3000`. The worker has the simulated model and a small KV cache. Jobs
arrive at about 1.5 times what it can serve; 5 % are cancelled at a random moment, 2 % are invalid.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from redis.asyncio import Redis
from rich.console import Console

from benchmarks.serving import Serving, own_redis, serving
from headrace.connect import connect
from headrace.keys import Keys
from headrace.log import read_log
from headrace.messages import CLASSES, ENDED, Delta, End
from worker.simulated import Answer, make_codec

POOL = "soak"
KEYS = Keys(POOL)
CANCELLED, INVALID = 0.05, 0.02
CAPACITY_PER_S = 75.0  # jobs of this mix that the simulated worker serves
SETTINGS: dict[str, str | int] = {
    "model": "simulated:step_ms=4,token_ms=0.02",
    "num_kv_blocks": 160,
    "max_num_seqs": 16,
    "lease_ms": 3000,
}


@dataclass(slots=True)
class Plan:
    """One job to send, what it must end as, and the answer of its first choice."""

    job_id: str
    fields: dict[str, str | int | float]
    kind: str
    answer: Answer


@dataclass(slots=True)
class Found:
    ends: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


def make_plans(count: int, rng: random.Random) -> list[Plan]:
    codec = make_codec()
    plans = []
    for n in range(count):
        prompt, tokens, seed = "w" * rng.randint(1, 200), rng.randint(1, 60), rng.getrandbits(40)
        fields: dict[str, str | int | float] = {
            "id": f"soak-{n}",
            "prompt": prompt,
            "max_tokens": tokens,
            "seed": seed,
            "n": rng.choice((1, 1, 1, 2)),
            "temperature": 0.8,
        }
        draw, kind = rng.random(), "done"
        if draw < INVALID:
            kind, fields["temperature"] = "failed", rng.choice(("nan", "-1", "hot"))
        elif draw < INVALID + CANCELLED:
            kind = "cancelled"
        answer = Answer(codec.encode_prompt(prompt), seed, 0)
        plans.append(Plan(f"soak-{n}", fields, kind, answer))
    return plans


async def send(redis: Redis, plans: list[Plan], rate: float, rng: random.Random) -> None:
    async with asyncio.TaskGroup() as cancels:
        for plan in plans:
            await asyncio.sleep(rng.expovariate(rate))
            await redis.xadd(KEYS.queue(rng.choice(CLASSES)), plan.fields)  # type: ignore[arg-type]
            if plan.kind == "cancelled":
                cancels.create_task(cancel(redis, plan.job_id, rng.random()))


async def cancel(redis: Redis, job_id: str, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await redis.hset(KEYS.job(job_id), "cancel", "1")  # type: ignore[misc]
    await redis.publish(KEYS.ctl, f"cancel {job_id}")


async def ended(redis: Redis, plans: list[Plan]) -> AsyncIterator[tuple[Plan, str]]:
    for plan in plans:
        while True:
            status: bytes | None = await redis.hget(KEYS.job(plan.job_id), "status")  # type: ignore[misc]
            if status is not None and status.decode() in ENDED:
                break
            await asyncio.sleep(0.02)
        yield plan, status.decode()


async def check(redis: Redis, plans: list[Plan]) -> Found:
    found = Found()
    async for plan, status in ended(redis, plans):
        events = await read_log(redis, KEYS, plan.job_id)
        said = [e for e in events if isinstance(e, Delta) and e.i == 0]
        num_tokens = sum(len(e.ids) for e in said)
        found.ends[status] += 1
        right = status == plan.kind or (plan.kind == "cancelled" and status == "done")
        right &= [e.seq for e in events] == list(range(1, len(events) + 1))
        right &= [isinstance(e, End) for e in events] == [False] * (len(events) - 1) + [True]
        right &= "".join(e.text for e in said) == plan.answer.text(num_tokens)
        right &= status != "done" or num_tokens == plan.fields["max_tokens"]
        if not right:
            found.bad.append(f"{plan.job_id}: {status} instead of {plan.kind}, {len(events)} events")
    return found


def anonymous_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


async def soak(worker: Serving, count: int, seed: int, console: Console) -> int:
    rng = random.Random(seed)
    redis = connect(worker.redis_url)
    first, rest = make_plans(count, rng)[: count // 5], make_plans(count, rng)[count // 5 :]
    await asyncio.gather(send(redis, first, CAPACITY_PER_S * 1.5, rng))
    warm = await check(redis, first)
    before_kib = anonymous_kib(worker.pid)
    await send(redis, rest, CAPACITY_PER_S * 1.5, rng)
    found = await check(redis, rest)
    card = await worker.settled_card()
    grown = (anonymous_kib(worker.pid) - before_kib) * 1024 / len(rest)
    bad = [*warm.bad, *found.bad]
    leaked = int(card["num_blocks"] - card["free_blocks"])
    left = sum([await redis.xlen(KEYS.queue(c)) for c in CLASSES]) + await redis.zcard(KEYS.leases)
    await redis.aclose()
    console.print(f"{count} jobs: {dict(warm.ends + found.ends)}; {int(card['preemptions'])} preemptions")
    console.print(f"bad: {len(bad)} {bad[:5]}; blocks leaked: {leaked}; entries and leases left: {left}")
    console.print(f"memory: {grown:.0f} bytes a job after the first fifth")
    return 1 if bad or leaked or left else 0


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with own_redis() as server, TemporaryDirectory() as folder:
        async with serving(server, POOL, SETTINGS, Path(folder) / "worker.log") as worker:
            return await worker.during(soak(worker, args.jobs, args.seed, Console(width=110)))


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
