"""A job forked from another's first tokens, with a real worker to go on from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.redis]
GREEDY = {"prompt": "Hello", "max_tokens": 40, "temperature": 0}


@pytest.fixture
def http(stack: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=30) as client:
        yield client


def ended(http: httpx.Client, job_id: str) -> dict[str, Any]:
    state: dict[str, Any] = http.get(f"/v1/jobs/{job_id}", params={"wait": 20}).json()
    assert state["status"] == "done", state
    return state


def run(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    return ended(http, http.post("/v1/jobs", json=fields).json()["id"])


def fork(http: httpx.Client, job_id: str, **fields: Any) -> dict[str, Any]:
    answer = http.post(f"/v1/jobs/{job_id}/fork", json=fields)
    assert answer.status_code == 202, answer.text
    return ended(http, answer.json()["id"])


@pytest.mark.parametrize("tokens", [0, 1, 17, 39])
def test_a_greedy_fork_says_the_same(http: httpx.Client, tokens: int) -> None:
    origin = run(http, **GREEDY)
    forked = fork(http, origin["id"], tokens=tokens)
    assert forked["id"] != origin["id"]
    ids, text = (
        [state["result"]["choices"][0][name] for state in (origin, forked)] for name in ("ids", "text")
    )
    assert ids[0] == ids[1]
    assert text[0] == text[1]
    assert forked["usage"]["prompt_tokens"] == origin["usage"]["prompt_tokens"]
    assert forked["usage"]["completion_tokens"] == 40


def test_another_seed_leaves_the_path_at_token_k(http: httpx.Client) -> None:
    origin = run(http, **{**GREEDY, "temperature": 1, "seed": 1, "n": 2})
    first = fork(http, origin["id"], tokens=20, choice=1, seed=2, id="forked-a")
    again = fork(http, origin["id"], tokens=20, choice=1, seed=2, id="forked-b")
    of_origin, of_fork = origin["result"]["choices"][1]["ids"], first["result"]["choices"][0]["ids"]
    assert of_origin[:20] == of_fork[:20]
    assert of_origin != of_fork
    assert again["result"]["choices"] == first["result"]["choices"]


def test_a_fork_of_a_running_job(http: httpx.Client, stack: Any) -> None:
    job_id = http.post("/v1/jobs", json={**GREEDY, "max_tokens": 3000}).json()["id"]
    stack.eventually(lambda: http.get(f"/v1/jobs/{job_id}").json().get("seq", 0) > 10)
    forked = fork(http, job_id, tokens=10, max_tokens=15)
    assert forked["usage"]["completion_tokens"] == 15
    assert http.delete(f"/v1/jobs/{job_id}").status_code in (200, 202)


def test_the_log_of_a_fork_is_gapless(http: httpx.Client) -> None:
    origin = run(http, **GREEDY)
    forked = fork(http, origin["id"], tokens=5)
    events = http.get(f"/v1/jobs/{forked['id']}/events").text
    ids = [int(line[4:]) for line in events.splitlines() if line.startswith("id: ")]
    assert ids == list(range(1, len(ids) + 1))
    assert events.count("event: end") == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tokens": 41, "max_tokens": 50}, "tokens"),
        ({"tokens": 5, "choice": 1}, "tokens"),
        ({"tokens": 5, "max_tokens": 5}, "max_tokens"),
        ({"tokens": 5, "temperature": -1}, "temperature"),
        ({"tokens": 5, "stop": "x"}, None),
        ({"tokens": "5"}, "tokens"),
        ({"tokens": 5, "id": "a b"}, "id"),
    ],
)
def test_what_cannot_be_forked_is_told(http: httpx.Client, fields: dict[str, Any], param: str | None) -> None:
    origin = run(http, **GREEDY)
    answer = http.post(f"/v1/jobs/{origin['id']}/fork", json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_fork_of_nothing(http: httpx.Client) -> None:
    assert http.post("/v1/jobs/nothing/fork", json={"tokens": 1}).status_code == 404


def test_the_same_id_twice(http: httpx.Client) -> None:
    origin = run(http, **GREEDY)
    path = f"/v1/jobs/{origin['id']}/fork"
    assert http.post(path, json={"tokens": 3, "id": "twice"}).status_code == 202
    assert http.post(path, json={"tokens": 3, "id": "twice"}).status_code == 202  # the reply was lost
    assert http.post(path, json={"tokens": 4, "id": "twice"}).status_code == 409
