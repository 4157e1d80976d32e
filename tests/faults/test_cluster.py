"""Pools on a Redis Cluster: each in a slot of its own, which moves, and whose node fails."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError

from headrace.client import Client
from headrace.cluster import ClusterRedis
from headrace.connect import connect, connect_sync
from headrace.keys import ARQ_TAG, POOLS, Keys
from headrace.places import key_slot
from headrace.tenants import Policy, TenantStore

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(120)]

OTHER = "second"  # a pool whose slot is on another node than that of `smollm2`
TOKENS = 100
PROBE = "{smollm2}probe"


@pytest.fixture(scope="module")
def running(redis_servers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    tools = sys.modules["fleet"]
    fleet = tools.Fleet(redis_servers("default").binary, tmp_path_factory.mktemp("cluster"))
    try:
        yield tools.Cluster(fleet)
    finally:
        fleet.close()


@pytest.fixture
def cluster(running: Any) -> Any:
    """Without keys or scripts."""
    for port in running.ports[:3]:
        running.fleet.client(port).flushall()
        running.fleet.client(port).script_flush()
    return running


@pytest.fixture
def pool(cluster: Any, tools: Any) -> Iterator[Any]:
    pool = tools.Pool(cluster.url)
    yield pool
    pool.close()


@pytest.fixture
async def client(cluster: Any) -> AsyncIterator[ClusterRedis]:
    client = connect(cluster.url)
    assert isinstance(client, ClusterRedis)
    yield client
    await client.aclose()


async def follow(client: Client, job_id: str, expected: str) -> None:
    said, last = "", 0
    async with aclosing(client.follow(job_id)) as events:
        async for event in events:
            assert event.seq == last + 1
            last = event.seq
            said += getattr(event, "text", "")
    assert said == expected


async def test_commands_go_to_the_node_of_their_key(cluster: Any, client: ClusterRedis) -> None:
    names = [f"{{{number}}}:x" for number in range(20)]
    async with client.pipeline(transaction=False) as pipe:
        for number, name in enumerate(names):
            pipe.set(name, number)
        pipe.time()
        pipe.incr("{0}:x")
        pipe.lpush("{1}:x", "no list")
        *replies, _, counted, wrong = await pipe.execute(raise_on_error=False)
    assert replies == [True] * 20
    assert counted == 1
    assert isinstance(wrong, redis.ResponseError)
    sizes = [cluster.fleet.client(port).dbsize() for port in cluster.ports[:3]]
    assert sum(sizes) == 20
    assert min(sizes) > 0
    assert [await client.get(name) for name in names[1:]] == [str(n).encode() for n in range(1, 20)]
    async with client.pipeline(transaction=True) as pipe:
        pipe.set("{3}:a", 1)
        pipe.incr("{3}:a")
        assert await pipe.execute() == [True, 2]
    async with client.pipeline(transaction=True) as pipe:
        pipe.set("{3}:a", 1)
        pipe.set("{4}:a", 1)
        with pytest.raises(redis.RedisError, match="one slot"):
            await pipe.execute()
    assert await client.get("{3}:a") == b"2"
    with pytest.raises(redis.RedisError, match="WATCH"):
        await client.pipeline().watch("x")
    found = await client.scan(0, match="{7}:*", count=1000)
    assert found == (0, [b"{7}:x"])
    sha = await client.script_load("return KEYS[1]")
    assert [await client.evalsha(sha, 1, name) for name in names] == [name.encode() for name in names]


async def test_followers_on_all_nodes_are_counted(cluster: Any, client: ClusterRedis) -> None:
    listening = [cluster.fleet.client(port).pubsub() for port in cluster.ports]
    for each in listening:
        each.subscribe("hr:{smollm2}:live:x")
        assert each.get_message(timeout=5)["type"] == "subscribe"
    assert await client.pubsub_numsub("hr:{smollm2}:live:x") == [(b"hr:{smollm2}:live:x", 3)]
    await client.publish("hr:{smollm2}:live:x", "to all of them")
    for each in listening:
        assert each.get_message(timeout=5)["data"] == b"to all of them"
        each.close()


async def test_a_slot_that_moves_is_followed(cluster: Any, client: ClusterRedis) -> None:
    tagged, lease = connect(cluster.url, tag="moving"), connect_sync(cluster.url, tag="moving")
    await client.mset({"{moving}:a": 1, "{moving}:b": 2})
    assert await tagged.get("{moving}:a") == lease.get("{moving}:a") == b"1"
    halfway, go_on = threading.Event(), threading.Event()
    moved = asyncio.create_task(asyncio.to_thread(cluster.move, key_slot("{moving}"), halfway, go_on))
    await asyncio.to_thread(halfway.wait)
    assert {await client.get("{moving}:a"), await client.get("{moving}:b")} == {b"1", b"2"}
    async with client.pipeline(transaction=False) as pipe:
        pipe.get("{moving}:a")
        pipe.get("{moving}:b")
        assert await pipe.execute() == [b"1", b"2"]
    both = asyncio.create_task(client.mget("{moving}:a", "{moving}:b"))
    with pytest.raises(RedisConnectionError, match="another server"):
        await tagged.mget("{moving}:a", "{moving}:b")
    with pytest.raises(RedisConnectionError, match="another server"):
        lease.mget("{moving}:a", "{moving}:b")
    go_on.set()
    await moved
    assert await both == [b"1", b"2"]
    async with client.pipeline(transaction=True) as pipe:
        pipe.incr("{moving}:a")
        assert await pipe.execute() == [2]
    for _ in range(2):  # the first may learn by a refusal that the slot is elsewhere
        try:
            found = await tagged.get("{moving}:a"), lease.get("{moving}:a")
        except RedisConnectionError:
            found = None
    assert found == (b"2", b"2")
    await tagged.aclose()
    lease.close()


async def test_two_pools_a_gateway_and_its_tasks(
    cluster: Any, client: ClusterRedis, pool: Any, tools: Any, services: Any, hooks: Any
) -> None:
    owners = {cluster.owner(key_slot(name)) for name in (pool.keys.ctl, Keys(OTHER).ctl)}
    assert len(owners) == 2
    assert len({key_slot(f"{{{tag}}}") for tag in ("smollm2", OTHER, "tenants", "files", ARQ_TAG)}) == 5
    workers = [pool.start(step_ms=2), pool.start("--pool", OTHER, step_ms=2, wait=False)]
    url = await asyncio.to_thread(services.gateway, cluster.url)
    services.tasks(cluster.url)
    await asyncio.to_thread(tools.eventually, lambda: pool.redis is None or both_known(url))
    await TenantStore(client).set_policy("default", Policy(requests_per_minute=1000, weight=2.0))
    assert await client.hget(Keys(OTHER).vtime, "w:default") == b"2.0"

    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        for name in ("smollm2", OTHER):
            body = {"model": name, "prompt": f"for {name}", "max_tokens": 30, "temperature": 0}
            answer = (await http.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == tools.answer(f"for {name}", 30)
            told = await http.post("/v1/jobs", json={**body, "webhook": hooks.url})
            await asyncio.to_thread(hooks.wait_for, told.json()["id"])
        listed = (await http.get("/v1/jobs")).json()["data"]
        assert {job["pool"] for job in listed} == {"smollm2", OTHER}
        assert len(listed) == 4
    _, key = await TenantStore(client).create_key("default")
    everything = sys.modules["fleet"].use_everything
    await asyncio.to_thread(hooks.wait_for, await asyncio.to_thread(everything, url, key, OTHER, hooks.url))
    assert all(worker.poll() is None for worker in workers)
    assert services.events("gateway") == ["listening"]
    assert set(services.events("gateway.tasks")) == {"tasks_running", "webhook", "batch"}
    assert await client.smembers(POOLS) == {b"smollm2", OTHER.encode()}


def both_known(url: str) -> bool:
    pools = httpx.get(f"{url}/readyz").json()["pools"]
    return all(pools.get(name, {}).get("workers") for name in ("smollm2", OTHER))


async def test_a_node_that_is_away_leaves_the_pools_of_others(
    cluster: Any, pool: Any, tools: Any, services: Any
) -> None:
    worker = await asyncio.to_thread(pool.start, step_ms=2)
    second = pool.start("--pool", OTHER, step_ms=2, wait=False)
    url = await asyncio.to_thread(services.gateway, cluster.url)
    await asyncio.to_thread(tools.eventually, lambda: both_known(url))
    away = cluster.owner(key_slot(Keys(OTHER).ctl))
    cluster.fleet.kill(away)
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:

        async def asked(model: str, prompt: str) -> httpx.Response:
            body = {"model": model, "prompt": prompt, "max_tokens": 5, "temperature": 0}
            return await http.post("/v1/completions", json=body)

        failed = False
        while not failed:  # until the other nodes have given it up
            for number in range(5):
                answer = await asked("smollm2", f"meanwhile {number}")
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["text"] == tools.answer(f"meanwhile {number}", 5)
            assert (await asked(OTHER, "x")).status_code == 503
            failed = "fail" in cluster.flags_of(away)
        await asyncio.to_thread(cluster.fleet.start, away)
        await asyncio.to_thread(tools.eventually, lambda: all(map(cluster.agrees, cluster.ports)))
    body = {"model": OTHER, "prompt": "back", "max_tokens": 5}
    await asyncio.to_thread(
        tools.eventually, lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=30).is_success, 20
    )
    assert worker.poll() is None
    assert second.poll() is None


@pytest.mark.parametrize("fault", ["its slot moves", "its node fails"])
async def test_a_pool_under_load(cluster: Any, pool: Any, tools: Any, fault: str) -> None:
    slot = key_slot(pool.keys.ctl)
    if fault == "its node fails":
        replica = await asyncio.to_thread(cluster.add_replica, cluster.owner(slot), PROBE)
    flags = ("--log-format", "json", "--log-level", "warning", "--lease-ms", "8000")
    worker = await asyncio.to_thread(pool.start, *flags, step_ms=20)
    async with Client(cluster.url, "smollm2") as client:
        prompts = [f"job {number}" for number in range(6)]
        jobs = [await client.submit(prompt, max_tokens=TOKENS, temperature=0) for prompt in prompts]
        followers = [
            asyncio.create_task(follow(client, job, tools.answer(prompt, TOKENS)))
            for job, prompt in zip(jobs, prompts, strict=True)
        ]
        await asyncio.to_thread(pool.wait_tokens, jobs[0], 10)
        if fault == "its slot moves":
            halfway, go_on = threading.Event(), threading.Event()
            moved = asyncio.create_task(asyncio.to_thread(cluster.move, slot, halfway, go_on))
            await asyncio.to_thread(halfway.wait)
            await asyncio.sleep(1.0)  # for a while no script can run: its keys are on two nodes
            go_on.set()
            await moved
        else:
            worker.send_signal(signal.SIGSTOP)  # what the replica does not have yet would be lost
            await asyncio.to_thread(cluster.fleet.replicate, cluster.owner(slot), PROBE)
            cluster.fleet.kill(cluster.owner(slot))
            worker.send_signal(signal.SIGCONT)
        await asyncio.wait_for(asyncio.gather(*followers), 60)
        if fault == "its node fails":
            assert cluster.owner(slot) == replica
        again = await client.submit("afterwards", max_tokens=5, temperature=0)
        state = await client.wait(again, 20)
        assert state.result.choices[0].text == tools.answer("afterwards", 5)
    worker.send_signal(signal.SIGTERM)
    _, said = await asyncio.to_thread(worker.communicate, timeout=15)
    assert worker.returncode == 0
    assert len(said.splitlines()) <= 8, said
