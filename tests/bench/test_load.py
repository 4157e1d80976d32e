"""The driver against a worker that is only a few Redis commands: what it measures must be what happened."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.load import LoadDriver, LoadError
from benchmarks.workload import Request, forced
from headrace.connect import connect
from headrace.embedded import EmbeddedRedis
from headrace.keys import Keys
from headrace.log import encode_fields, encode_live
from headrace.messages import Delta, End, Event, Finish, Usage

pytestmark = pytest.mark.redis
KEYS = Keys("bench-test")
GAP_S = 0.05


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


async def answer(redis: Redis, job_id: str, num_tokens: int, told: int, status: str) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=told, total_tokens=1 + told)
    events: list[Event] = [Delta(seq=i + 1, text="x", ids=[7]) for i in range(num_tokens)]
    events.append(Finish(seq=num_tokens + 1, reason="length"))
    events.append(End(seq=num_tokens + 2, status=status, usage=usage))  # type: ignore[arg-type]
    for event in events:
        if isinstance(event, Delta):
            await asyncio.sleep(GAP_S)
        fields = encode_fields(event)
        await redis.xadd(
            KEYS.log(job_id), dict(zip(fields[::2], fields[1::2], strict=True)), f"{event.seq}-0"
        )
        await redis.publish(KEYS.live(job_id), encode_live(event))


@asynccontextmanager
async def fake_worker(
    server: EmbeddedRedis, *, missing: int = 0, status: str = "done"
) -> AsyncIterator[None]:
    redis = connect(server.url, max_connections=64)

    async def work() -> None:
        last = b"0"
        async with asyncio.TaskGroup() as jobs:
            while True:
                for _, entries in await redis.xread({KEYS.queue("normal"): last}, block=1000) or []:
                    for entry_id, fields in entries:
                        last = entry_id
                        tokens = int(fields[b"max_tokens"])
                        jobs.create_task(
                            answer(redis, fields[b"id"].decode(), tokens - missing, tokens, status)
                        )

    working = asyncio.create_task(work())
    try:
        yield
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await redis.aclose()


def requests(*output_tokens: int, apart_s: float = 0.0) -> list[Request]:
    return [forced({"prompt": "x"}, tokens, i * apart_s) for i, tokens in enumerate(output_tokens)]


async def test_times_are_those_of_the_events(server: EmbeddedRedis) -> None:
    async with fake_worker(server), LoadDriver(server.url, KEYS.pool) as driver:
        first, second = await driver.run(requests(3, 5, apart_s=0.1), timeout_s=20)
    assert (len(first.token_s), len(second.token_s)) == (3, 5)
    assert first.first_token_s >= GAP_S * 0.9
    assert second.submitted_s >= 0.1
    assert second.token_s == sorted(second.token_s)
    assert second.ended_s >= second.submitted_s + 5 * GAP_S * 0.9


async def test_many_jobs_at_once(server: EmbeddedRedis) -> None:
    async with fake_worker(server), LoadDriver(server.url, KEYS.pool) as driver:
        jobs = await driver.run(requests(*[4] * 40), timeout_s=20)
    assert [len(job.token_s) for job in jobs] == [4] * 40


@pytest.mark.parametrize(("missing", "status"), [(1, "done"), (0, "failed")])
async def test_a_run_in_which_a_job_went_wrong_has_no_figures(
    missing: int, status: str, server: EmbeddedRedis
) -> None:
    async with (
        fake_worker(server, missing=missing, status=status),
        LoadDriver(server.url, KEYS.pool) as driver,
    ):
        with pytest.raises(ExceptionGroup) as failure:
            await driver.run(requests(3), timeout_s=20)
    assert failure.group_contains(LoadError)
