"""A seeded driver adds, cancels, preempts and fails; invariants hold and outputs equal undisturbed ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from headrace.errors import HeadraceError
from worker.engine.plan import StepPlan, StepResult
from worker.engine.request import Request

Make = Callable[..., Any]


class Driver:
    """Works on the scheduler itself, so that plans can be in flight while other things happen."""

    def __init__(self, bench: Any, request_of: Make, seed: int, depth: int) -> None:
        self.bench = bench
        self.request_of = request_of
        self.rng = random.Random(seed)
        self.depth = depth
        self.flight: list[tuple[StepPlan, Callable[[], StepResult]]] = []
        self.launches = bench.scheduler.config.plan_ahead
        bench.runner.strict = False
        self.requests: dict[str, Request] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.failed: set[str] = set()

    def add(self) -> None:
        rng, name = self.rng, f"r{len(self.requests)}"
        shared = [rng.choice((1, 2))] * rng.randrange(0, 24)
        prompt = [*shared, *(rng.randrange(50) for _ in range(rng.randrange(1, 20)))]
        request = self.request_of(
            name,
            prompt,
            rng.randrange(1, 30),
            seed=rng.randrange(100),
            priority=rng.randrange(3),
            arrival_s=self.bench.clock.now,
            n=rng.choice((1, 1, 1, 2, 4)),
            min_tokens=rng.choice((0, 0, 3)),
            salt=rng.choice("ab"),
            logprobs=0 if self.launches and rng.random() < 0.05 else None,  # a draw that needs the host
        )
        self.requests[name] = request
        self.bench.engine.add(request)

    def disturb(self) -> None:
        rng, roster = self.rng, self.bench.scheduler.roster
        dice = rng.random()
        if dice < 0.05 and roster.groups:
            name = rng.choice(sorted(roster.groups))
            self.aborted |= {(name, c) for c in range(4)}
            self.bench.engine.abort(name)
        elif dice < 0.10 and roster.groups:
            name, choice = rng.choice(sorted(roster.groups)), rng.randrange(2)
            self.aborted.add((name, choice))
            self.bench.engine.abort(name, choice)
        elif dice < 0.16 and len(roster.running):
            roster.preempt(rng.choice(list(roster.running)))

    def step(self) -> None:
        scheduler = self.bench.scheduler
        plan = scheduler.plan(self.bench.clock.now)
        if plan is not None:
            self.check_plan(plan)
            run = partial(self.bench.runner.run, plan)
            self.flight.append((plan, self.bench.runner.launch(plan).result if self.launches else run))
        self.disturb()
        while self.flight and (len(self.flight) >= self.depth or plan is None):
            oldest, run = self.flight.pop(0)
            result = self.spoil(oldest, run())
            self.disturb()
            scheduler.apply(oldest, result, self.bench.clock.now)
        for output in scheduler.take_outputs():
            self.bench._take(output)
        scheduler.check_integrity()
        self.bench.clock.now += self.rng.random() * 0.1

    def check_plan(self, plan: StepPlan) -> None:
        config = self.bench.scheduler.config
        assert 0 < plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.sequences) <= len(self.bench.scheduler.roster.running) <= config.max_num_seqs
        assert len({p.seq_id for p in plan.sequences}) == len(plan.sequences)
        for part in plan.sequences:
            assert len(part.block_table) * config.block_size >= part.start + len(part.token_ids)

    def spoil(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Let a sequence fail now and then."""
        if self.rng.random() > 0.01:
            return result
        victim = self.rng.choice(plan.sequences).seq_id
        owners = [
            g.request.request_id
            for g in self.bench.scheduler.roster.groups.values()
            for s in g.live
            if s.seq_id == victim
        ]
        self.failed.update(owners)
        return replace(result, failed={victim: HeadraceError("non_finite")})

    def live(self, solo: Make) -> None:
        bench = self.bench
        while len(self.requests) < 40:
            if self.rng.random() < 0.4:
                self.add()
            self.step()
        for _ in range(5000):
            if not bench.engine.has_work and not self.flight:
                break
            bench.scheduler.take_released()
            self.step()
        self.check_outputs(solo)
        assert bench.scheduler.pool.num_used == 0
        assert bench.scheduler.pool.num_free == bench.scheduler.config.num_blocks

    def check_outputs(self, solo: Make) -> None:
        for name, request in self.requests.items():
            for choice in range(request.params.n):
                want, got = solo(request, choice), self.bench.tokens.get((name, choice), [])
                if (name, choice) in self.aborted or name in self.failed:
                    assert got == want[: len(got)]
                else:
                    assert got == want, (name, choice)
                    assert (name, choice) in self.bench.finish
        assert set(self.bench.errors) <= self.failed


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("guesses", [0, 4])
@pytest.mark.parametrize(("num_blocks", "hash_bytes"), [(24, 32), (24, 1), (200, 32)])
def test_random_life(
    bench: Make,
    request_of: Make,
    solo: Make,
    repeating: Make,
    seed: int,
    depth: int,
    guesses: int,
    num_blocks: int,
    hash_bytes: int,
) -> None:
    b = bench(
        draw=repeating,
        num_blocks=num_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        prefix_hash_bytes=hash_bytes,
        speculative_tokens=guesses,
    )
    Driver(b, request_of, seed, depth).live(partial(solo, draw=repeating))
    assert (b.engine.stats().right_guesses > 20) == (guesses > 0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("num_blocks", "hash_bytes"), [(24, 32), (24, 1), (200, 32)])
def test_random_life_planned_ahead(
    bench: Make, request_of: Make, solo: Make, seed: int, eager: bool, num_blocks: int, hash_bytes: int
) -> None:
    """A launched step is computed at once or not before it is waited for: a device is in between."""
    b = bench(
        num_blocks=num_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        prefix_hash_bytes=hash_bytes,
        plan_ahead=True,
    )
    b.runner.eager = eager
    Driver(b, request_of, seed, 2).live(solo)
    assert sum(part.pending for plan in b.runner.plans for part in plan.sequences) > 100
