"""What the gateway's benchmark concludes from what it measured."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.gateway import Carried, Level, _compare, _Moment, _Reader


def level(streams: int, *, p99_ms: float = 10.0, rate: float = 1.0) -> Level:
    return Level(streams, streams * 20.0 * rate, 5.0, p99_ms, 2.0, 0.5, 50.0, 15.0, 0.1)


def test_the_most_streams_that_came_in_time_and_in_full() -> None:
    late, slow = level(500, p99_ms=22.1), level(600, rate=0.9)
    assert Carried([level(100), level(250, p99_ms=21.9), late, slow], 1.0).sustained == level(
        250, p99_ms=21.9
    )
    assert Carried([late, slow], 1.0).sustained is None


def test_a_tokens_cost_is_that_of_the_time_between() -> None:
    before = _Moment(0.0, 1.0, 0.5, 1000, None)
    after = _Moment(10.0, 2.0, 0.7, 21_000, None)
    found = _compare(100, before, after, [1.0, 2.0, 3.0], 1.0)
    assert (found.tokens_per_s, found.cpu_us_per_token) == (2000.0, 50.0)
    assert found.bare_cpu_us_per_token == pytest.approx(10.0)
    assert found.cpu == pytest.approx(0.1)


async def test_a_reader_counts_and_a_sampled_one_times() -> None:
    stamp = round(asyncio.get_running_loop().time() * 1e9) - 5_000_000
    data = b'data: {"choices":[{"delta":{"content":"%d "}}]}\n\n' % stamp
    readers = [_Reader("x", sampled) for sampled in (True, False)]
    for reader in readers:
        reader.data_received(data * 2)
    assert [reader.tokens for reader in readers] == [2, 2]
    assert len(readers[0].latencies_ms) == 2
    assert readers[0].latencies_ms[0] >= 5
    assert readers[1].latencies_ms == []
