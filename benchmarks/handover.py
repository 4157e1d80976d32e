"""How long a client waits when its worker is told to leave: `python -m benchmarks.handover`.

Two workers, the demo model (or `--step-ms` of the simulated one), some jobs under way in the first; it gets
SIGTERM, and the second goes on. The gap at a follower is compared with two engine steps and the prefill of
the contexts handed over, both measured in the same round: steps before the signal, the prefill as the time to
first token of as many new prompts of that length. `claimed` is when the second worker had the jobs, after the
signal: what the hand-over itself takes, the step under way included. Take figures on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from benchmarks.figures import percentile
from benchmarks.relay import Relay
from benchmarks.serving import own_redis
from headrace.connect import connect
from headrace.follow import Follower
from headrace.keys import Keys
from headrace.messages import Delta

POOL = "handover"
KEYS = Keys(POOL)
LEASE_MS = 20_000  # a gap that had to wait for a lease would be seen at once
BEFORE, AFTER = 24, 4  # tokens that a job says before and after the hand-over
WAIT_S = 120.0
PAUSE_S = 0.5  # the worker is to be asleep when the prefill is measured
TOKEN_IDS = (300, 40_000)  # ordinary tokens of the demo model
BYTE_IDS = (97, 122)  # of the simulated one


@dataclass(frozen=True, slots=True)
class Round:
    """All in ms. `gaps`: one for each job."""

    gaps: list[float]
    claimed: float
    step: float
    prefill: float

    @property
    def bound(self) -> float:
        return 2 * self.step + self.prefill


class Reader:
    """Follows one job and notes when its tokens come."""

    def __init__(self, redis: Redis, follower: Follower, ids: Sequence[int], max_tokens: int) -> None:
        self._redis, self._follower = redis, follower
        self.job_id = f"job-{secrets.token_hex(8)}"
        self._fields: dict[Any, Any] = {"prompt_token_ids": str(list(ids)), "max_tokens": max_tokens}
        self._fields |= {"id": self.job_id, "temperature": 0, "ignore_eos": 1}
        self._came = asyncio.Condition()
        self.submitted_s = 0.0
        self.times_s: list[float] = []
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self.submitted_s = time.monotonic()
        await self._redis.xadd(KEYS.queue("normal"), self._fields)
        async with aclosing(self._follower.follow(KEYS, self.job_id)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    async with self._came:
                        self.times_s.append(time.monotonic())
                        self._came.notify_all()

    async def reach(self, tokens: int) -> None:
        async with asyncio.timeout(WAIT_S), self._came:
            await self._came.wait_for(lambda: len(self.times_s) >= tokens)

    async def reach_after(self, at_s: float, tokens: int) -> None:
        """Returns when so many tokens have come after `at_s`."""
        await self.reach(sum(time_s <= at_s for time_s in self.times_s) + tokens)

    async def stop(self) -> None:
        await self._redis.hset(KEYS.job(self.job_id), "cancel", "1")  # type: ignore[misc]
        await self._task


async def one_round(
    redis: Redis, follower: Follower, relay: Relay, jobs: int, context: int, ids: tuple[int, int]
) -> Round:
    rng = random.Random()

    def prompt(length: int) -> list[int]:
        return [rng.randint(*ids) for _ in range(length)]

    readers = [Reader(redis, follower, prompt(context), 4_000) for _ in range(jobs)]
    await asyncio.gather(*(reader.reach(BEFORE) for reader in readers))
    told_s = await relay.hand_over()
    clock_s = time.time() - time.monotonic()
    await asyncio.gather(*(reader.reach_after(told_s, AFTER + 2) for reader in readers))
    said = max(sum(time_s <= told_s for time_s in reader.times_s) for reader in readers)
    await asyncio.gather(*(reader.stop() for reader in readers))
    await asyncio.sleep(PAUSE_S)
    fresh = [Reader(redis, follower, prompt(context + said), 1) for _ in range(jobs)]
    await asyncio.gather(*(reader.reach(1) for reader in fresh))
    prefill_s = max(reader.times_s[0] - reader.submitted_s for reader in fresh)
    steps = [gap for reader in readers for gap in gaps_s(reader.times_s[4:], until_s=told_s)]
    gaps = [max(gaps_s(reader.times_s, since_s=told_s)) for reader in readers]
    claimed_s = max(relay.claimed_s(reader.job_id) for reader in readers) - clock_s - told_s
    each_s = claimed_s, statistics.median(steps), prefill_s
    return Round([gap * 1000 for gap in gaps], *(seconds * 1000 for seconds in each_s))


def gaps_s(times_s: Sequence[float], *, since_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
    """Times between tokens, of those that lie at least partly behind `since_s` and before `until_s`."""
    return [after - before for before, after in pairwise(times_s) if after > since_s and after <= until_s]


async def measure(args: argparse.Namespace, folder: Path) -> dict[int, list[Round]]:
    settings: dict[str, str | int] = {"lease_ms": LEASE_MS, "log_format": "json", "prefix_cache": "false"}
    if args.step_ms:
        settings["model"] = f"simulated:step_ms={args.step_ms}"
    found: dict[int, list[Round]] = {jobs: [] for jobs in args.jobs}
    with own_redis() as server:
        async with AsyncExitStack() as stack:
            relay = Relay(stack, server, POOL, settings, folder)
            redis = connect(server.url)
            stack.push_async_callback(redis.aclose)
            follower = await stack.enter_async_context(Follower(server.url))
            for _ in range(args.rounds):
                for jobs, rounds in found.items():
                    await relay.prepare()
                    ids = BYTE_IDS if args.step_ms else TOKEN_IDS
                    rounds.append(await one_round(redis, follower, relay, jobs, args.context, ids))
    return found


def show(found: dict[int, list[Round]], console: Console) -> bool:
    """Whether p99 of the gaps is within the bound for each number of jobs."""
    table = Table(
        "jobs", "rounds", "claimed", "step", "prefill", "gap p50", "p99", "max", "bound", "p99 / bound"
    )
    good = True
    for jobs, rounds in found.items():
        gaps = [gap for each in rounds for gap in each.gaps]
        shares = [gap / each.bound for each in rounds for gap in each.gaps]
        figures = [statistics.median(each.claimed for each in rounds)]
        figures += [statistics.median(each.step for each in rounds)]
        figures += [statistics.median(each.prefill for each in rounds), percentile(gaps, 50)]
        figures += [percentile(gaps, 99), max(gaps), statistics.median(each.bound for each in rounds)]
        cells = [f"{figure:.0f} ms" for figure in figures]
        table.add_row(str(jobs), str(len(rounds)), *cells, f"{percentile(shares, 99):.2f}")
        good &= percentile(shares, 99) <= 1
    console.print(table)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 4], help="under way at the signal")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=5, help="hand-overs for each number of jobs")
    parser.add_argument("--step-ms", type=float, default=0, help="of the simulated model; 0: the demo model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hr-handover-") as folder:
        found = asyncio.run(measure(args, Path(folder)))
    return 0 if show(found, Console(width=None if sys.stdout.isatty() else 110)) else 1


if __name__ == "__main__":
    sys.exit(main())
