"""Every refusal names its field; nothing a producer can write does more than that."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import HeadraceError
from headrace.messages import Job, SamplingParams
from headrace.params import RULES
from headrace.submission import (
    Limits,
    NewerVersion,
    Prompt,
    job_id_of,
    parse_entry,
    parse_request,
    submission_fields,
)

LIMITS = Limits()
CHAT = [{"role": "user", "content": "a"}]


def parse(fields: dict[Any, Any]) -> Job:
    raw = {as_bytes(name): as_bytes(value) for name, value in fields.items()}
    return parse_entry("t", "normal", "5-0", raw, LIMITS)


def as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def refusal(fields: dict[Any, Any]) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        parse(fields)
    return caught.value


def error_of(call: Callable[[], object]) -> HeadraceError | None:
    try:
        call()
    except HeadraceError as error:
        return error
    return None


def body(**values: Any) -> dict[str, bytes]:
    return {"body": msgspec.json.encode(values)}


def test_flat_fields() -> None:
    job = parse(
        {
            "prompt": "why?",
            "max_tokens": "48",
            "temperature": ".5",
            "stop": "\n",
            "stop_token_ids": "[1, 2]",
            "logit_bias": '{"7": -100}',
            "ignore_eos": "true",
            "tenant": "acme",
            "ttl_ms": "1000",
            "meta": '{"a":1}',
            "something": "else",
        }
    )
    assert job.id == "normal-5-0"
    assert job.params == SamplingParams(
        max_tokens=48,
        temperature=0.5,
        stop=("\n",),
        stop_token_ids=(1, 2),
        logit_bias={7: -100.0},
        ignore_eos=True,
    )
    assert (job.tenant, job.ttl_ms, bytes(job.meta or b"")) == ("acme", 1000, b'{"a":1}')


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": "[]"}, "messages"),
        ({"prompt": b"\xff\xfe"}, "prompt"),
        ({"prompt": "a", "max_tokens": "x"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "-1"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "0"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "1e308"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "9" * 30}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "1_0"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "١"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": ""}, "max_tokens"),
        ({"prompt": "a", "temperature": "nan"}, "temperature"),
        ({"prompt": "a", "temperature": "inf"}, "temperature"),
        ({"prompt": "a", "temperature": "1e999"}, "temperature"),
        ({"prompt": "a", "temperature": "0x1p3"}, "temperature"),
        ({"prompt": "a", "temperature": "-0.1"}, "temperature"),
        ({"prompt": "a", "top_p": "1.01"}, "top_p"),
        ({"prompt": "a", "n": "0"}, "n"),
        ({"prompt": "a", "n": "129"}, "n"),
        ({"prompt": "a", "ignore_eos": "yes"}, "ignore_eos"),
        ({"prompt": "a", "stop": '["a", ""]'}, "stop[1]"),
        ({"prompt": "a", "stop": "[1]"}, "stop[0]"),
        ({"prompt": "a", "stop": "["}, "stop"),
        ({"prompt": "a", "stop_token_ids": "[true]"}, "stop_token_ids[0]"),
        ({"prompt": "a", "logit_bias": '{"-1": 1}'}, "logit_bias"),
        ({"prompt": "a", "logit_bias": '{"1": "x"}'}, "logit_bias.1"),
        ({"prompt": "a", "logit_bias": "[" * 100_000}, "logit_bias"),
        ({"prompt": "a", "min_tokens": "5", "max_tokens": "4"}, "min_tokens"),
        ({"prompt": "a", "id": "a b"}, "id"),
        ({"prompt": "a", "id": b"a\0"}, "id"),
        ({"prompt": "a", "id": "x" * 10_000}, "id"),
        ({"prompt": "a", "id": b"\xff"}, "id"),
        ({"prompt": "a", "ttl_ms": "0"}, "ttl_ms"),
        ({"prompt": "a", "ttl_ms": "-5"}, "ttl_ms"),
        ({"prompt": "a", "ttl_ms": "1000000000000"}, "ttl_ms"),
        ({"prompt": "a", "tenant": "a:b"}, "tenant"),
        ({"prompt": "a", "webhook": "file:///etc/passwd"}, "webhook"),
        ({"prompt": "a", "meta": "{"}, "meta"),
        ({"prompt": "a", "on_disconnect": "explode"}, "on_disconnect"),
        ({"prompt": "a", "v": "one"}, "v"),
        ({"prompt": "a", "v": "0"}, "v"),
        ({"prompt_token_ids": "[]"}, "prompt_token_ids"),
        ({"prompt_token_ids": "[1, -1]"}, "prompt_token_ids[1]"),
        ({"prompt_token_ids": "[1.0]"}, "prompt_token_ids[0]"),
        ({"messages": "{}"}, "messages"),
        ({"messages": "[]"}, "messages"),
        ({"messages": "[1]"}, "messages[0]"),
        ({"messages": '[{"role":"user"}]'}, "messages[0].content"),
        ({"messages": '[{"content":"x"}]'}, "messages[0].role"),
        ({"messages": '[{"role":"user","content":[{"type":"image_url"}]}]'}, "messages[0].content[0]"),
        ({"messages": "[" * 100_000}, "messages"),
        ({"messages": b'[{"role":"user","content":"\xff"}]'}, "messages"),
        ({"body": "{"}, "body"),
        ({"body": "[]"}, "body"),
        ({"body": "null"}, "body"),
        ({"body": '{"prompt":"a","temperature":NaN}'}, "body"),
        ({"body": "{}", "prompt": "a"}, "prompt"),
        ({"body": '{"a":' * 100_000}, "body"),
        ({"body": b"\xc1", "ct": "application/msgpack"}, "body"),
        ({"body": b"\x81\x01\x02", "ct": "application/msgpack"}, "body"),
        ({"body": b"\x91" * 100_000, "ct": "application/msgpack"}, "body"),
        ({"body": "{}", "ct": "text/plain"}, "ct"),
        (body(prompt="a", max_tokens="4"), "max_tokens"),
        (body(prompt="a", max_tokens=True), "max_tokens"),
        (body(prompt="a", max_tokens=4.0), "max_tokens"),
        (body(prompt="a", temperature="0.7"), "temperature"),
        (body(prompt="a", temperature=False), "temperature"),
        (body(prompt="a", seed=2**63), "seed"),
        (body(prompt=["a", "b"]), "prompt"),
        (body(prompt=[1, True]), "prompt"),
        (body(prompt="a", tools=[{}]), "tools"),
        (body(prompt="a", tool_choice="auto"), "tool_choice"),
        (body(prompt="a", response_format={"type": "json_object"}), "response_format"),
        (body(messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=21), "top_logprobs"),
        (body(messages=[{"role": "user", "content": "a"}], top_logprobs=2), "top_logprobs"),
        (
            body(messages=[{"role": "user", "content": "a"}], max_completion_tokens="9"),
            "max_completion_tokens",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[Any, Any], field: str) -> None:
    error = refusal(fields)
    assert (error.code, error.field) == ("invalid_request", field)
    assert field in error.message or "needed" in error.message
    assert len(error.message) < 300


def test_message_pack_can_say_nan_and_is_refused() -> None:
    packed = msgspec.msgpack.encode({"prompt": "a", "temperature": float("nan")})
    assert refusal({"body": packed, "ct": "application/msgpack"}).field == "temperature"


def test_half_a_surrogate_pair_is_refused() -> None:
    assert refusal({"body": r'{"prompt": "\ud800"}'}).field in ("body", "prompt")


def test_invalid_bytes_in_a_field_name_are_ignored() -> None:
    assert parse({b"\xff\xfe": b"\xff", "prompt": "a"}).prompt == "a"


def test_a_newer_version_is_told_apart() -> None:
    with pytest.raises(NewerVersion) as caught:
        parse({"v": "2", "prompt": "a"})
    assert caught.value.field == "v"
    assert parse({"v": "1", "prompt": "a"}).prompt == "a"


def test_too_large() -> None:
    assert refusal({"prompt": "x" * 1_048_577}).code == "too_large"
    assert parse({"prompt": "x" * 1_000_000}).prompt is not None


def test_the_id_falls_back_to_the_entry() -> None:
    assert job_id_of("low", "1-2", {b"id": b"mine"}) == "mine"
    for wrong in (b"", b"a b", b"\xff", b"x" * 129):
        assert job_id_of("low", "1-2", {b"id": wrong}) == "low-1-2"


def test_chat_names_are_mapped() -> None:
    prompt, params = parse_request(
        "chat",
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "be brief", "unknown": 1},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            "max_completion_tokens": 9,
            "logprobs": True,
            "top_logprobs": 3,
            "stop": "x",
            "user": "u",
            "stream": True,
            "temperature": None,
            "response_format": {"type": "text"},
            "tool_choice": "none",
            "logit_bias": {"5": 1},
        },
    )
    assert prompt == Prompt(
        "messages", [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}]
    )
    assert params == SamplingParams(max_tokens=9, logprobs=3, stop=("x",), logit_bias={5: 1.0})


def test_chat_logprobs_without_top() -> None:
    request = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    assert parse_request("chat", request)[1].logprobs == 0
    assert parse_request("chat", {**request, "logprobs": False})[1].logprobs is None


def test_completion_names_are_mapped() -> None:
    prompt, params = parse_request("completion", {"prompt": [1, 2], "logprobs": 2, "echo": True, "n": 2})
    assert prompt == Prompt("prompt_token_ids", (1, 2))
    assert params == SamplingParams(logprobs=2, echo=True, n=2)
    assert parse_request("completion", {"prompt": ["one"]})[0] == Prompt("prompt", "one")


def test_a_flat_field_goes_before_the_body() -> None:
    fields = {**body(prompt="a", max_completion_tokens=5, temperature=0.1), "max_tokens": "7"}
    assert parse(fields).params == SamplingParams(max_tokens=7, temperature=0.1)


def test_message_pack_body() -> None:
    packed = msgspec.msgpack.encode({"prompt": "a", "max_tokens": 3})
    assert parse({"body": packed, "ct": "application/msgpack"}).params.max_tokens == 3


def test_a_bad_traceparent_fails_no_job() -> None:
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert parse({"prompt": "a", "traceparent": good}).traceparent == good
    assert parse({"prompt": "a", "traceparent": "rubbish"}).traceparent is None


finite = st.floats(0, 1, allow_nan=False)
params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(10, 1_000_000),
    min_tokens=st.integers(0, 10),
    temperature=st.floats(0, 100),
    top_p=finite,
    top_k=st.integers(-1, 2**31 - 1),
    min_p=finite,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    n=st.integers(1, 5),
    best_of=st.none() | st.integers(5, 128),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=4).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
    include_stop=st.booleans(),
    bad_words=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=4).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    logit_bias=st.dictionaries(st.integers(0, 50_000), st.floats(-100, 100), max_size=4),
    ignore_eos=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(params_strategy, st.text(st.characters(codec="utf-8"), max_size=30))
def test_flat_fields_say_the_same_again(params: SamplingParams, text: str) -> None:
    job = parse(submission_fields(Prompt("prompt", text), params))
    assert (job.prompt, job.params) == (text, params)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    [*RULES, "prompt", "messages", "prompt_token_ids", "tools", "top_logprobs", "max_completion_tokens"]
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(names, junk, max_size=5))
def test_no_request_does_more_than_be_refused(request: dict[str, Any]) -> None:
    for kind in ("chat", "completion", "any"):
        error = error_of(lambda kind=kind: submission_fields(*parse_request(kind, request)))
        assert error is None or error.field


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        names.map(str.encode) | st.sampled_from([b"id", b"v", b"body", b"ct", b"ttl_ms", b"meta", b"tenant"]),
        st.binary(max_size=20) | junk.map(lambda value: json.dumps(value, default=repr).encode()),
        max_size=5,
    )
)
def test_no_entry_does_more_than_be_refused(fields: dict[bytes, bytes]) -> None:
    error = error_of(lambda: parse(fields))
    assert error is None or error.field
