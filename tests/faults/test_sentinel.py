"""A master behind sentinels that changes under load: nothing is restarted, and no answer is spliced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.exceptions import ConnectionError

from headrace.client import Client
from headrace.connect import connect, connect_sync
from headrace.errors import HeadraceError
from headrace.messages import Delta, End

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(90)]

DEPLOY = Path(__file__).parents[2] / "deploy" / "redis"
SERVICE = "mymaster"
TOKENS = 120
JOBS = 8
DOWN_AFTER_MS = 2500  # a sentinel on a busy machine takes a slow answer for none
MAX_LINES = 12
LONGER_THAN_A_FAILOVER_MS = 12_000  # its worker goes on where it was; with a shorter lease it begins anew


class Watched:
    """A master, a replica and a sentinel; the URL names a sentinel first that nobody runs."""

    def __init__(self, fleet: Any, tools: Any, *flags: str) -> None:
        fast = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", *flags)
        self.fleet = fleet
        self.tools = tools
        self.master = fleet.add(*fast)
        self.replica = fleet.add("--replicaof", "127.0.0.1", str(self.master), *fast)
        tools.eventually(self.in_step, 20)
        fleet.replicate(self.master, "probe")
        config = (DEPLOY / "sentinel.conf").read_text()
        for line, here in (
            (f"monitor {SERVICE} 127.0.0.1 6379 2", f"monitor {SERVICE} 127.0.0.1 {self.master} 1"),
            (f"down-after-milliseconds {SERVICE} 5000", f"down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}"),
        ):
            assert line in config
            config = config.replace(line, here)
        self.sentinel = fleet.add("--sentinel", config=config)
        self.url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{self.sentinel}/{SERVICE}/0"
        tools.eventually(self.known, 20)

    def in_step(self) -> bool:
        replicas = self.fleet.client(self.master).info("replication")
        return replicas.get("slave0", {}).get("state") == "online"

    def known(self) -> bool:
        """Whether the sentinel has a replica that it can promote."""
        replicas = self.fleet.client(self.sentinel).sentinel_slaves(SERVICE)
        return any(replica["master-link-status"] == "ok" for replica in replicas)

    def current(self) -> int:
        return int(self.fleet.client(self.sentinel).sentinel_get_master_addr_by_name(SERVICE)[1])

    def fail_over(self) -> None:
        self.fleet.client(self.sentinel).execute_command("SENTINEL", "FAILOVER", SERVICE)

    def demote_old(self) -> None:
        """As the sentinel does it, eight seconds sooner."""
        with self.fleet.client(self.master).pipeline() as pipe:
            pipe.execute_command("REPLICAOF", "127.0.0.1", self.replica)
            pipe.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            pipe.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            pipe.execute()

    def kill_master(self) -> None:
        self.fleet.kill(self.master)

    def kill_master_that_was_ahead(self) -> None:
        """What its replica had not received is lost, acknowledged as it was."""
        master = self.fleet.client(self.master)
        master.execute_command("ACL", "SETUSER", "default", "-psync", "-sync")
        written = master.info("replication")["master_repl_offset"]
        master.client_kill_filter(_type="slave")
        self.tools.eventually(lambda: master.info("replication")["master_repl_offset"] > written + 20_000)
        self.kill_master()


@pytest.fixture
def watched(request: pytest.FixtureRequest, fleet: Any, tools: Any) -> Watched:
    return Watched(fleet(), tools, *getattr(request, "param", ()))


@pytest.fixture
def pool(watched: Watched, tools: Any) -> Iterator[Any]:
    pool = tools.Pool(watched.url)
    yield pool
    pool.close()


@pytest.fixture
def worker(pool: Any, request: pytest.FixtureRequest) -> subprocess.Popen[str]:
    lease_ms = getattr(request, "param", LONGER_THAN_A_FAILOVER_MS)
    flags = ("--log-format", "json", "--log-level", "warning", "--lease-ms", str(lease_ms))
    return pool.start(*flags, step_ms=20)


async def follow(client: Client, job_id: str, prompt: str, tools: Any) -> str:
    """`done` or `lost`; fails for anything else, and for a single wrong byte."""
    expected, said, last = tools.answer(prompt, TOKENS), "", 0
    try:
        async with aclosing(client.follow(job_id)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    assert event.seq == last + 1
                    said += event.text
                    assert expected.startswith(said)
                elif isinstance(event, End):
                    if event.status == "done":
                        assert said == expected
                    else:
                        assert (event.error or {}).get("code") == "lost"
                    return "done" if event.status == "done" else "lost"
                last = event.seq
    except HeadraceError as error:
        if error.code != "lost":
            raise
        return "lost"
    raise AssertionError("no end")


async def lives(client: Client, worker: subprocess.Popen[str], tools: Any) -> None:
    assert worker.poll() is None
    again = await client.submit("afterwards", max_tokens=5, temperature=0)
    state = await client.wait(again, 20)
    assert state.result.choices[0].text == tools.answer("afterwards", 5)
    worker.send_signal(signal.SIGTERM)
    _, said = await asyncio.to_thread(worker.communicate, timeout=15)
    assert len(said.splitlines()) <= MAX_LINES, said
    events = [json.loads(line)["event"] for line in said.splitlines()]
    for failing in ("emit_failing", "claim_failing", "lease_renewal_failing"):
        assert events.count(failing) <= 2, said  # the old master goes, and is then found to be none


@pytest.mark.parametrize(
    ("how", "worker"),
    [
        ("fail_over", LONGER_THAN_A_FAILOVER_MS),
        ("kill_master", LONGER_THAN_A_FAILOVER_MS),
        ("kill_master", 1_500),
        ("kill_master_that_was_ahead", LONGER_THAN_A_FAILOVER_MS),
    ],
    indirect=["worker"],
)
async def test_a_new_master_under_load(
    watched: Watched, pool: Any, worker: Any, tools: Any, how: str
) -> None:
    async with Client(watched.url, "smollm2") as client:
        prompts = [f"job {number}" for number in range(JOBS)]
        jobs = [await client.submit(prompt, max_tokens=TOKENS, temperature=0) for prompt in prompts]
        followers = [
            asyncio.create_task(follow(client, job, prompt, tools))
            for job, prompt in zip(jobs, prompts, strict=True)
        ]
        await asyncio.to_thread(pool.wait_tokens, jobs[0], 10)
        await asyncio.to_thread(getattr(watched, how))
        outcomes = await asyncio.wait_for(asyncio.gather(*followers), 40)
        assert watched.current() == watched.replica
        if how == "kill_master":
            assert set(outcomes) == {"done"}
        elif how == "kill_master_that_was_ahead":
            assert "lost" in outcomes
        await lives(client, worker, tools)


async def stream(url: str, prompt: str, started: asyncio.Event) -> str:
    """What a gateway streams for `prompt`, to its end."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    said = ""
    async with (
        httpx.AsyncClient(timeout=40) as http,
        http.stream("POST", f"{url}/v1/completions", json=body) as r,
    ):
        async for line in r.aiter_lines():
            if line.startswith("data: {"):
                said += json.loads(line[6:])["choices"][0]["text"]
                started.set()
    assert line == "" or line == "data: [DONE]"
    return said


def submitted(url: str, hook: str) -> str | None:
    """A job's id, or None while the gateway has no Redis."""
    job = {"prompt": "told of", "max_tokens": 4, "temperature": 0, "webhook": hook}
    answer = httpx.post(f"{url}/v1/jobs", json=job, timeout=20)
    assert answer.status_code in (202, 503)
    return answer.json().get("id")


@pytest.mark.parametrize("watched", [["--min-replicas-to-write", "1"]], indirect=True)
async def test_nothing_is_lost_when_a_master_without_replicas_refuses_to_write(
    watched: Watched, pool: Any, worker: Any, tools: Any, services: Any, hooks: Any
) -> None:
    if int(watched.fleet.client(watched.master).info("server")["redis_version"].split(".")[0]) < 7:
        pytest.skip("before Redis 7 scripts may write to a master without replicas all the same")
    url = await asyncio.to_thread(services.gateway, watched.url)
    tasks = services.tasks(watched.url)
    started = asyncio.Event()
    streaming = asyncio.create_task(stream(url, "through it", started))
    await started.wait()
    # A write in the instant in which the replica leaves, before the master knows, would be lost all the same.
    worker.send_signal(signal.SIGSTOP)
    assert await asyncio.to_thread(watched.fleet.client(watched.master).wait, 1, 5000) == 1
    await asyncio.to_thread(watched.fail_over)
    await asyncio.to_thread(tools.eventually, lambda: watched.current() == watched.replica)
    worker.send_signal(signal.SIGCONT)
    await asyncio.to_thread(watched.demote_old)
    assert await streaming == tools.answer("through it", TOKENS)

    job_id = await asyncio.to_thread(tools.eventually, lambda: submitted(url, hooks.url), 20)
    await asyncio.to_thread(hooks.wait_for, job_id)
    assert tasks.poll() is None
    assert services.events("gateway").count("redis_unreachable") <= 1
    assert len(services.events("gateway")) <= 6, services.said("gateway")
    assert services.events("gateway.tasks").count("redis_away") <= 2  # one for each of its queues

    command = [sys.executable, "-c", "from headrace.cli import main; main()", "poll", job_id]
    env = os.environ | {"HEADRACE_REDIS_URL": watched.url}
    shown = await asyncio.to_thread(subprocess.run, command, env=env, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["status"] == "done"


async def test_a_replica_is_not_taken_for_the_master(watched: Watched) -> None:
    """A sentinel may be behind: the server itself is asked for its role."""
    watched.fleet.client(watched.sentinel).execute_command("SENTINEL", "REMOVE", SERVICE)
    client = connect(watched.url)
    with pytest.raises(ConnectionError, match="knows a master 'mymaster'"):
        await client.ping()
    monitor = ("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", str(watched.replica), "1")
    watched.fleet.client(watched.sentinel).execute_command(*monitor)
    with pytest.raises(ConnectionError, match="is none"):
        await client.ping()
    with pytest.raises(ConnectionError, match="is none"):
        connect_sync(watched.url).ping()
    watched.fleet.client(watched.replica).execute_command("REPLICAOF", "NO", "ONE")
    assert await client.ping()
    await client.aclose()
