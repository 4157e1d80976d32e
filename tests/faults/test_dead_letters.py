"""`headrace dead`: both kinds of given-up entries can be listed, shown, replayed and dropped."""

from __future__ import annotations

import json

import pytest
import redis
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.keys import Keys

pytestmark = pytest.mark.redis
KEYS = Keys("smollm2")
HISTORY = '[{"worker":"w1","epoch":1,"seq":4,"together":1,"at":1}]'


@pytest.fixture
def server(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def dead(redis_url):
    def run(*words: str, status: int = 0) -> str:
        found = CliRunner().invoke(app, ["dead", *words, "--redis-url", redis_url], env={"COLUMNS": "200"})
        assert found.exit_code == status, found.output
        return found.stdout

    return run


def bury(server, **fields: str) -> str:
    header = {"job": "j1", "class": "low", "entry": "5-0", "attempt": "2", "at": "5", "history": HISTORY}
    flat = [part for pair in [*header.items(), *fields.items(), ("prompt", "second")] for part in pair]
    return server.eval("return redis.call('XADD', KEYS[1], '*', unpack(ARGV))", 1, KEYS.dead, *flat).decode()


def test_list_and_show_tell_the_history(server, dead):
    letter = bury(server, id="j1", prompt="boom")
    assert letter in dead("list")
    shown = json.loads(dead("show", letter))
    assert (shown["job"], shown["history"][0]["worker"]) == ("j1", "w1")
    assert shown["fields"] == [["id", "j1"], ["prompt", "boom"], ["prompt", "second"]]


def test_replay_submits_it_again_under_a_new_id(server, dead):
    letter = bury(server, id="j1", prompt="boom")
    job_id = dead("replay", letter).strip()
    ((_, fields),) = server.xrange(KEYS.queue("low"))
    assert fields == {b"id": job_id.encode(), b"prompt": b"boom"}
    assert server.xlen(KEYS.dead) == 0
    assert job_id != "j1"


def test_undecodable_bytes_are_shown_replayed_and_dropped(server, dead):
    ids = [server.xadd(KEYS.undecodable, {b"\xff\xfe": b"\x00", b"v": b"9"}).decode() for _ in range(2)]
    assert "\\xff\\xfe" in json.loads(dead("show", ids[0], "--undecodable"))["fields"][0][0]
    dead("replay", ids[0], "--undecodable", "--class", "high")
    ((_, fields),) = server.xrange(KEYS.queue("high"))
    assert (fields[b"\xff\xfe"], fields[b"v"]) == (b"\x00", b"9")
    assert "dropped 1 of 1" in dead("drop", ids[1], "--undecodable")
    assert server.xlen(KEYS.undecodable) == 0


def test_what_is_not_there_is_said_in_a_line(dead):
    dead("show", "1-1", status=1)
    dead("drop", "1-1", status=1)
