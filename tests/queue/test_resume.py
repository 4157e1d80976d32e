"""Taken over at any position, an answer is the same to the last byte: for each kind of request there is.

`python -m benchmarks.resume` kills workers at every position of long answers. Here every state that a log can
be found in is gone on from once, and one kill hits each kind of job at several positions, for both models.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.resume import Plan, rehearse
from headrace.connect import connect
from headrace.messages import Delta, End, Event, Finish
from headrace.scripts import Scripts

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(120)]

TOKENS = 24
DRAWN = {"prompt": "été 👩‍🔬 水車", "max_tokens": TOKENS, "temperature": 0.9, "seed": 5}
KINDS: dict[str, dict[str, Any]] = {
    "seeded": DRAWN,
    "penalised": DRAWN | {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "stop": DRAWN,  # its stop string is chosen from what it says
    "two": DRAWN | {"n": 2},
    "logprobs": DRAWN | {"logprobs": 3},
    "echo": DRAWN | {"echo": "true", "n": 2},
}


@pytest.fixture
def tools(request: pytest.FixtureRequest):
    """The helpers of this folder's conftest, which importlib mode does not let us import."""
    return sys.modules[type(request.getfixturevalue("pool")).__module__]


def told(events: list[Event]) -> list[Event]:
    """The events without what the prefix cache saved, which differs from run to run."""
    return [_told(event) for event in events]


def _told(event: Event) -> Event:
    if isinstance(event, Delta):
        return msgspec.structs.replace(event, cached=0)
    if isinstance(event, End) and event.usage is not None:
        return msgspec.structs.replace(event, usage=msgspec.structs.replace(event.usage, cached_tokens=0))
    return event


async def take_over(pool: Any, kind: str, fields: dict[str, Any], events: list[Event]) -> list[str]:
    """One job for each state that the log can have been left in, from empty to all but the end."""
    redis = connect(pool.url)
    scripts = Scripts(redis, pool.keys)
    prompt_tokens = events[-1].usage.prompt_tokens
    jobs = []
    for said in range(len(events)):
        if isinstance(events[said], Finish) and "n" in fields:
            continue  # a token and the `finish` it brings are one write: with two choices their order tells
        jobs.append(f"{kind}-{said}")
        await scripts.fork("normal", jobs[-1], fields, events[:said], prompt_tokens=prompt_tokens)
    await redis.aclose()
    return jobs


def test_from_every_state_of_the_log_to_the_same_end(pool, tools):
    pool.start("--max-num-seqs", "64", step_ms=2)
    calm = {kind: pool.wait_end(pool.submit(id=kind, **fields)) for kind, fields in KINDS.items()}
    said = tools.text_of(calm["seeded"])
    KINDS["stop"] = DRAWN | {"stop": said[len(said) // 2 :][:3]}
    calm["stop"] = pool.wait_end(pool.submit(id="stopped", **KINDS["stop"]))
    assert len(tools.ids_of(calm["stop"])) < TOKENS
    assert not said.isascii()
    assert len([e for e in calm["two"] if isinstance(e, Finish)]) == 2
    jobs = {kind: asyncio.run(take_over(pool, kind, KINDS[kind], events)) for kind, events in calm.items()}
    for kind, ids in jobs.items():
        for job in ids:
            assert told(pool.wait_end(job)) == told(calm[kind]), job
    tools.eventually(pool.drained)


@pytest.mark.alone  # it waits for leases of two models that compute
@pytest.mark.timeout(300)  # two real workers start
@pytest.mark.parametrize("plan", [Plan(10, 1, 60, 1), Plan(8, 3, 0, 1)], ids=["simulated", "real"])
async def test_clients_of_a_killed_worker_hear_what_others_hear(plan: Plan, tmp_path: Path) -> None:
    report = await rehearse(plan, tmp_path)
    assert report.different == []
    assert report.kills == 1
    assert {kind for kind, hit in report.hit.items() if hit} == set(report.positions)
