"""What the gateway's benchmark concludes from what it measured."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from benchmarks import machine
from benchmarks.gateway import Carried, Idle, Level, level_of
from benchmarks.gateway_sides import Crowd, Side, Stream
from benchmarks.load import LoadError


def level(streams: int, *, p99_ms: float = 10.0, rate: float = 1.0) -> Level:
    return Level(streams, streams * 20.0 * rate, 5.0, p99_ms, 2.0, 0.5, 50.0, 15.0, 0.2, 1.0, 0.1)


def carried(*levels: Level) -> Carried:
    return Carried([*levels], Idle(100, 30.0, 0.01), "not installed")


def test_the_most_streams_that_came_in_time_and_in_full() -> None:
    late, slow = level(500, p99_ms=20.1), level(600, rate=0.9)
    assert carried(level(100), level(250, p99_ms=19.9), late, slow).sustained == level(250, p99_ms=19.9)
    assert carried(late, slow).sustained is None


def test_a_tokens_cost_is_that_of_the_time_between() -> None:
    read = {"tokens": 20_000, "wall_s": 10.0, "p50_ms": 1.0, "p99_ms": 3.0, "reader_cpu": 0.2}
    found = level_of(
        100, read, 1.0, {"p99_ms": 2.0, "cpu_us_per_token": 10.0}, {"late_p99_ms": 0.5}, others=None
    )
    assert (found.tokens_per_s, found.cpu_us_per_token) == (2000.0, 50.0)
    assert (found.latency_p50_ms, found.latency_p99_ms, found.bare_p99_ms) == (1.0, 3.0, 2.0)
    assert found.cpu == pytest.approx(0.1)


def test_a_stream_counts_and_a_sampled_one_times() -> None:
    stamp = time.monotonic_ns() - 5_000_000
    data = b'data: {"choices":[{"delta":{"content":"%d "}}]}\n\n' % stamp
    streams = [Stream(sampled) for sampled in (True, False)]
    for stream in streams:
        stream.take(data * 2)
    assert [stream.tokens for stream in streams] == [2, 2]
    assert len(streams[0].latencies_ms) == 2
    assert streams[0].latencies_ms[0] >= 5
    assert streams[1].latencies_ms == []


async def test_a_crowd_reads_what_each_is_sent() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"{}")).startswith(b"POST /v1/chat/completions ")
        writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"content":"%d "}\n\n' % time.monotonic_ns())
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        def read() -> Crowd:
            crowd = Crowd(url, 20, b"{}")
            crowd.wait_until_answered(with_tokens=True)
            crowd.close()
            return crowd

        crowd = await asyncio.to_thread(read)
    assert [stream.tokens for stream in crowd.streams] == [1] * 20
    assert [len(stream.latencies_ms) for stream in crowd.streams] == [1, *[0] * 9] * 2


def test_a_side_that_fails_says_why() -> None:
    with Side("hold", "http://127.0.0.1:1", 1, body={}) as side, pytest.raises(LoadError, match="refused"):
        side.line()


def test_the_cpu_of_each_thread() -> None:
    def work() -> None:
        end_s = time.thread_time() + 0.1
        while time.thread_time() < end_s:
            pass
        found.update(machine.thread_cpu_s(os.getpid()))

    found: dict[int, float] = {}
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert thread.native_id is not None
    assert 0.08 <= found[thread.native_id] <= 0.2
