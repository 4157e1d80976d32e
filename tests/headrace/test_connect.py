"""Clients and their URLs; the asyncio client under cancellation, on which every orderly stop depends."""

import asyncio
import threading
from typing import Any

import pytest
import redis
import redis.crc

from headrace.cluster import key_of
from headrace.config import ConfigError, GatewaySettings, redact_url
from headrace.connect import connect, connect_sync, connections
from headrace.places import NUM_SLOTS, SlotMap, SlotOwner, is_elsewhere, key_slot
from headrace.redis_url import parse_redis_url
from headrace.sentinel import Master

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("kind", ["url", "unix_url"])
async def test_a_cancelled_task_stops(redis_server: object, kind: str) -> None:
    client = connect(getattr(redis_server, kind))

    async def ask_for_ever() -> None:
        while True:
            await client.get("x")

    for attempt in range(100):
        task = asyncio.create_task(ask_for_ever())
        await asyncio.sleep(0.002 + attempt * 0.00013)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=2)
        assert done, f"attempt {attempt} lost the cancellation"
    assert await client.ping()
    await client.aclose()


async def test_a_server_that_became_a_replica_is_left(redis_server: Any) -> None:
    """Behind a moving address the next connection leads to the new master."""
    client = connect(redis_server.url, max_connections=1)
    before = await client.client_id()
    with redis_server.client() as operator:
        operator.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(redis.exceptions.ReadOnlyError):
        await client.set("x", 1)
    assert await client.client_id() != before
    await client.aclose()


@pytest.mark.parametrize(
    ("url", "server", "nodes", "service"),
    [
        ("redis+sentinel://a,b:7/main", "redis://a:26379/0", (("a", 26379), ("b", 7)), "main"),
        ("rediss+sentinel://u:p%40@a:1/m/3?x=1", "rediss://u:p%40@a:1/3?x=1", (("a", 1),), "m"),
        ("redis+cluster://[::1]:6,b", "redis://[::1]:6/0", (("::1", 6), ("b", 6379)), ""),
        ("rediss+cluster://:p@a/0", "rediss://:p@a:6379/0", (("a", 6379),), ""),
        ("unix:///tmp/x?db=1", "unix:///tmp/x?db=1", (), ""),
    ],
)
def test_urls(url: str, server: str, nodes: Any, service: str) -> None:
    found = parse_redis_url(url)
    assert (found.server_url, found.nodes, found.service) == (server, nodes, service)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://a", "redis\\+sentinel"),
        ("redis+sentinel://a", "mymaster"),
        ("redis+sentinel://a:x/m", "'a:x'"),
        ("redis+sentinel://a,,b/m", "separated by commas"),
        ("redis+cluster://a/1", "database 0"),
        ("redis+sentinel://a/m/main", "a URL like"),
    ],
)
def test_urls_that_are_none(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"HEADRACE_REDIS_URL=.*{told}"):
        GatewaySettings(redis_url=url)


def test_no_password_of_a_url_is_shown() -> None:
    url = "redis+sentinel://u:one@a,b/m?sentinel_username=s&sentinel_password=two&x=1"
    assert redact_url(url) == "redis+sentinel://u:***@a,b/m?sentinel_username=s&sentinel_password=***&x=1"


def test_who_answers_to_whom() -> None:
    found = connections("redis+sentinel://u:one@a/m?sentinel_password=two", connect_timeout_s=1)
    asking = found.connection_kwargs["asking"].options
    assert (found.connection_kwargs["password"], asking["username"], asking["password"]) == (
        "one",
        None,
        "two",
    )
    found = connections("redis+cluster://u:one@a", connect_timeout_s=1)
    asking = found.connection_kwargs["asking"].options
    assert (found.connection_kwargs["password"], asking["username"], asking["password"]) == (
        "one",
        "u",
        "one",
    )


def as_bytes(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


def test_slots_are_those_of_redis() -> None:
    keys = ["", "x", "hr:{smollm2}:q:normal", "{}x", "{a}{b}", "a{b", "hr:{tenants}:keys", b"\xff{\xfe}"]
    assert [key_slot(key) for key in keys] == [redis.crc.key_slot(as_bytes(key)) for key in keys]
    assert key_slot("123456789") == 0x31C3  # as the specification has it


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("GET", "k"), "k"),
        (("EVALSHA", "sha", 2, "k", "l", "arg"), "k"),
        (("EVAL", "return 1", 0), None),
        (("XREAD", b"COUNT", b"1", b"STREAMS", "k", "0-0"), "k"),
        (("SCAN", 0, b"MATCH", "hr:{p}:job:*", b"COUNT", 9), "hr:{p}:job:*"),
        (("XGROUP CREATE", "k", "g", "0"), "k"),
        (("SCRIPT LOAD", "return 1"), None),
        (("TIME",), None),
        (("PUBLISH", "channel", "x"), None),
    ],
)
def test_the_key_that_a_command_goes_by(command: Any, key: str | None) -> None:
    assert key_of(command) == key


@pytest.mark.parametrize(
    ("text", "elsewhere"),
    [
        ("UNBLOCKED force unblock from blocking operation, instance state changed", True),
        ("NOREPLICAS Not enough good replicas to write.", True),
        ("Error running script (call to f_1): @user_script:1: -READONLY You can't write", True),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
        ("a text that says READONLYMODE is off", False),
    ],
)
def test_errors_that_another_server_may_not_give(text: str, elsewhere: bool) -> None:
    assert is_elsewhere(redis.ResponseError(text)) is elsewhere


def test_a_map_of_slots_is_believed_until_it_is_doubted() -> None:
    slots = SlotMap((("seed", 1),))
    place = SlotOwner(slots, 5)
    assert place.known() is None
    assert place.seeds() == [("seed", 1)]
    reply = [[0, 9, [b"", 7, b"id"], [b"r", 8, b"id"]], [10, NUM_SLOTS - 1, [b"b", 9, b"id"]]]
    assert place.read(reply, ("asked", 1)) == ("asked", 7)
    assert place.known() == ("asked", 7)
    assert slots.masters == [("asked", 7), ("b", 9)]
    slots.move(5, ("c", 3))
    assert place.known() == ("c", 3)
    place.doubt()
    assert place.known() is None
    assert set(place.seeds()) == {("asked", 7), ("r", 8), ("b", 9), ("seed", 1)}


def test_any_master_is_not_the_one_that_did_not_answer() -> None:
    slots = SlotMap(())
    slots.read([[0, 9, [b"a", 1]], [10, NUM_SLOTS - 1, [b"b", 2]]], ("seed", 1))
    anywhere = SlotOwner(slots, None)
    for _ in range(20):
        failed = anywhere.known()
        anywhere.doubt()
        assert anywhere.read([[0, 9, [b"a", 1]], [10, NUM_SLOTS - 1, [b"b", 2]]], ("seed", 1)) != failed


def test_nobody_watches_a_master_that_nobody_uses() -> None:
    """The thread ends with the last client, also while no sentinel answers."""

    class Nobody:
        def connection_sync(self, address: Any) -> redis.Connection:
            return redis.Connection(host="127.0.0.1", port=1)

    master = Master((("127.0.0.1", 1),), "m")
    master.arrived(Nobody())
    (watch,) = [thread for thread in threading.enumerate() if thread.name == "sentinels"]
    del master
    watch.join(5)
    assert not watch.is_alive()


def test_one_thread_asks_for_all_clients(redis_server: Any) -> None:
    first, second = (connect_sync("redis+sentinel://127.0.0.1:1/m").connection_pool for _ in range(2))
    assert first.connection_kwargs["place"] is second.connection_kwargs["place"]
