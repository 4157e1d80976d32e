"""Every refusal: its status, its code, the field it names; and what each request must not do."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.redis
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JOBS = "/v1/jobs"
ASK = {"messages": [{"role": "user", "content": "x"}]}


WRONG: list[tuple[str, Any, str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"messages": ["x"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    (CHAT, {**ASK, "max_tokens": "5"}, "max_tokens"),
    (CHAT, {**ASK, "max_tokens": 0}, "max_tokens"),
    (CHAT, {**ASK, "max_tokens": 1.5}, "max_tokens"),
    (CHAT, {**ASK, "max_tokens": True}, "max_tokens"),
    (CHAT, {**ASK, "max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {**ASK, "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    (CHAT, {**ASK, "temperature": -1}, "temperature"),
    (CHAT, {**ASK, "temperature": "hot"}, "temperature"),
    (CHAT, {**ASK, "top_p": 2}, "top_p"),
    (CHAT, {**ASK, "n": 0}, "n"),
    (CHAT, {**ASK, "stop": 5}, "stop"),
    (CHAT, {**ASK, "logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {**ASK, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {**ASK, "stream": "yes"}, "stream"),
    (CHAT, {**ASK, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (CHAT, {**ASK, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {**ASK, "tool_choice": "auto"}, "tool_choice"),
    (CHAT, {**ASK, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {**ASK, "functions": [{}]}, "functions"),
    (CHAT, {**ASK, "on_disconnect": "explode"}, "on_disconnect"),
    (CHAT, {**ASK, "class": "urgent"}, "class"),
    (CHAT, {**ASK, "ttl_ms": 0}, "ttl_ms"),
    (CHAT, {**ASK, "tenant": "a b"}, "tenant"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [1, "x"]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": ["x"] * 129}, "prompt"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
    (TEXT, {"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
    (TEXT, {"prompt": [1], "echo": True}, "echo"),
    (TEXT, {"prompt": "x", "logprobs": True}, "logprobs"),
    (JOBS, {}, "prompt"),
    (JOBS, {"prompt": "x", "messages": []}, "messages"),
    (JOBS, {"prompt": "x", "id": "a b"}, "id"),
    (JOBS, {"prompt": "x", "class": "urgent"}, "class"),
    (JOBS, {"prompt": "x", "body": {"prompt": "y"}}, "body"),
    (JOBS, {"prompt": "x", "webhook": "ftp://x"}, "webhook"),
    (JOBS, {"prompt": "x", "on_disconnect": "cancel_after:"}, "on_disconnect"),
]
NO_JSON: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b'"x"', None),
    (b"\xff\xfe", None),
    (b'{"unknown": ' + b"[" * 100_000, None),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
    (b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"5": Infinity}}', "5"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
]


async def test_a_wrong_field_is_named(http: httpx.AsyncClient) -> None:
    for path, body, param in WRONG:
        answer = await http.post(path, json=body)
        case, error = f"{path} {body}: {answer.text}", answer.json()["error"]
        found = (answer.status_code, error["code"], error["type"])
        assert found == (400, "invalid_request", "invalid_request_error"), case
        assert error["param"] == param or error["param"].startswith(param), case
        assert error["message"], case


async def test_what_is_no_json(http: httpx.AsyncClient) -> None:
    for raw, param in NO_JSON:
        answer = await http.post(CHAT, content=raw, headers={"content-type": "application/json"})
        case, error = f"{raw[:80]!r}: {answer.text}", answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_request"), case
        assert error["param"] == param, case


async def test_an_unknown_model_names_the_known_ones(http: httpx.AsyncClient) -> None:
    for path, body in ((CHAT, ASK), (TEXT, {"prompt": "x"}), (JOBS, {"prompt": "x"})):
        answer = await http.post(path, json={**body, "model": "gpt-5"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "unknown_model", "model")
        assert "smollm2" in error["message"]


async def test_a_body_over_the_limit(start_gateway: Any) -> None:
    gateway = await start_gateway(max_body_bytes=1000)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}).encode()

    async def in_pieces() -> Any:
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        for content in (body, in_pieces()):
            answer = await client.post(CHAT, content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


@pytest.mark.parametrize("ceiling", [{"max_queue_entries": 2}, {"max_queue_bytes": 6000}])
async def test_a_full_queue(start_gateway: Any, ceiling: dict[str, int]) -> None:
    gateway = await start_gateway(**ceiling)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        for _ in range(2):
            assert (await client.post(JOBS, json={"prompt": "x" * 3000})).status_code == 202
        for path, body in ((JOBS, {"prompt": "x"}), (CHAT, {**ASK, "stream": True})):
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["content-type"] == "application/json"


async def test_paths_and_methods_that_are_not_there(http: httpx.AsyncClient) -> None:
    missing = await http.get("/v2/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await http.get(CHAT)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_no_refusal_leaves_anything_in_redis(http: httpx.AsyncClient, db: Any) -> None:
    for body in ({}, {**ASK, "n": 0}, {**ASK, "model": "none"}, {**ASK, "tools": [{}]}):
        assert (await http.post(CHAT, json=body)).status_code in (400, 404)
    assert [key for key in await db.keys("hr:*") if b":q:" in key or b":job:" in key] == []
