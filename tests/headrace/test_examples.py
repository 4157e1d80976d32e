"""The examples that speak to Redis, against a log whose events are hard to print."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace.keys import Keys
from headrace.log import encode_fields
from headrace.messages import Delta, End, Event, Finish, Usage

pytestmark = pytest.mark.redis

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXTS = ["Blue", "", ' "sky","text","x",\n\t\\n % ', "é 🌍 火", "\\", '"']
ASK = {
    "bash": ["bash", str(EXAMPLES / "ask.sh"), "Why?"],
    "python": [sys.executable, str(EXAMPLES / "ask.py"), "Why?"],
}


def answer_next_job(client: redis.Redis, keys: Keys, events: list[Event]) -> None:
    """Plays the worker: waits for one entry and writes its log."""
    stream = keys.queue("normal").encode()
    reply: Any = client.xread({stream: "0"}, block=20_000)
    entry_id, fields = reply[0][1][0]
    assert fields[b"prompt"] == b"Why?"
    for event in events:
        client.xadd(keys.log("normal-" + entry_id.decode()), _pairs(event), id=f"{event.seq}-0")


def _pairs(event: Event) -> dict[Any, Any]:
    flat = encode_fields(event)
    return dict(zip(map(str, flat[::2]), flat[1::2], strict=True))


@pytest.mark.parametrize("language", ASK)
@pytest.mark.parametrize("status", ["done", "failed"])
def test_an_example_prints_exactly_the_answer(redis_url: str, language: str, status: str) -> None:
    deltas: list[Event] = [Delta(seq=n, text=text, ids=[n]) for n, text in enumerate(TEXTS, 1)]
    n = len(deltas)
    other = Delta(seq=n + 1, i=1, text="another choice", ids=[1])
    finish = Finish(seq=n + 2, reason="length")
    usage = Usage(prompt_tokens=1, completion_tokens=n, total_tokens=n + 1)
    error = None if status == "done" else {"code": "internal", "message": "broken"}
    end = End(seq=n + 3, status=status, usage=usage, error=error)  # type: ignore[arg-type]
    port = redis_url.split(":")[2].split("/")[0]
    env = os.environ | {"REDIS_CLI": f"redis-cli -p {port}", "REDIS_URL": redis_url, "POOL": "p"}
    with redis.Redis.from_url(redis_url) as client, start(ASK[language], env) as process:
        answer_next_job(client, Keys("p"), [*deltas, other, finish, end])
        out, err = process.communicate(timeout=60)
    assert out.decode() == "".join(TEXTS) + "\n"
    assert process.returncode == (0 if status == "done" else 1), err
    assert (b"broken" in err) == (status == "failed")


def start(command: list[str], env: dict[str, str]) -> "subprocess.Popen[bytes]":
    if command[0] == "bash" and subprocess.run(["which", "redis-cli"], capture_output=True).returncode:
        pytest.skip("redis-cli is not installed")
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
