"""The parts that need no server: strict decoding, log-probabilities, merged streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.decoding import decode
from gateway.errors import describe, job_error
from gateway.merge import merged
from gateway.openai.logprobs import TextOffsets, first_token_bytes, token_text
from gateway.openai.requests import split_prompts
from gateway.store import new_id
from gateway.stream import sse
from headrace.errors import ERRORS, HeadraceError
from headrace.keys import valid_job_id
from headrace.messages import TokenLogprob


class Body(msgspec.Struct):
    n: int | None = None
    inner: dict[str, list[float]] | None = None


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b'{"n": "1"}', "n"),
        (b'{"n": 1.5}', "n"),
        (b'{"n": NaN}', "n"),
        (b'{"inner": {"a": [1, -Infinity]}}', "a"),
        (b'{"inner": {"a": ["x"]}}', "inner"),
        (b"", None),
        (b"[1", None),
        (b"{" * 200_000, None),
    ],
)
def test_a_body_that_cannot_be_read(raw: bytes, field: str | None) -> None:
    with pytest.raises(HeadraceError) as refused:
        decode(raw, Body)
    assert refused.value.code == "invalid_request"
    assert (refused.value.field or "").startswith(field or "")
    assert field or refused.value.field is None


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    with suppress(HeadraceError):
        decode(raw, Body)


def test_a_token_that_is_part_of_a_character() -> None:
    assert token_text("é".encode()) == "é"
    assert token_text("é".encode()[:1]) == "bytes:\\xc3"


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=30))
def test_offsets_count_characters_wherever_tokens_are_cut(text: str, lengths: list[int]) -> None:
    raw, pieces = text.encode("utf-8", "surrogatepass"), []
    if raw.decode("utf-8", "replace") != text:
        return
    for length in [*lengths, len(raw)]:
        pieces.append(raw[:length])
        raw = raw[length:]
    tokens = [TokenLogprob(id=i, lp=-1.0, b=list(piece)) for i, piece in enumerate(pieces)]
    offsets = TextOffsets().lists(tokens, with_top=False)
    whole = b"".join(pieces)
    at = 0
    for piece, offset in zip(pieces, offsets.text_offset, strict=True):
        assert offset == len(whole[:at].decode("utf-8", "ignore"))
        at += len(piece)
    assert offsets.top_logprobs is None


@pytest.mark.parametrize(("prompt", "first"), [("promp", b"pro"), ("mp", b""), ("other", b"")])
def test_a_prompts_first_token(prompt: str, first: bytes) -> None:
    assert first_token_bytes(prompt, [None, TokenLogprob(id=1, lp=-1.0, b=list(b"mp"))]) == first


async def numbers(count: int, fail: bool = False) -> AsyncGenerator[int, None]:
    for number in range(count):
        await asyncio.sleep(0)
        yield number
    if fail:
        raise HeadraceError("lost")


async def test_merged_streams_keep_their_own_order() -> None:
    pairs = [pair async for pair in merged([numbers(5), numbers(0), numbers(3)])]
    assert [n for i, n in pairs if i == 0] == list(range(5))
    assert [n for i, n in pairs if i == 2] == list(range(3))
    assert len(pairs) == 8
    assert [pair async for pair in merged([numbers(2)])] == [(0, 0), (0, 1)]


async def test_the_first_failure_ends_a_merge() -> None:
    with pytest.raises(HeadraceError, match="lost"):
        async for _ in merged([numbers(2, fail=True), numbers(10_000)]):
            pass


@pytest.mark.parametrize(
    ("prompt", "split"),
    [("x", ["x"]), ([1, 2], [[1, 2]]), (["x", "y"], ["x", "y"]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(prompt: object, split: list[object]) -> None:
    assert split_prompts(prompt) == split  # type: ignore[arg-type]


@pytest.mark.parametrize("code", ERRORS)
def test_each_code_has_its_status(code: str) -> None:
    status, body = describe(job_error(HeadraceError(code, "why", "field").to_wire(), "failed"))
    assert status == ERRORS[code].http_status
    assert (body.error.code, body.error.message, body.error.param) == (code, "why", "field")
    assert body.error.retryable == ERRORS[code].retryable


def test_what_nobody_foresaw_is_internal_and_keeps_its_words() -> None:
    status, body = describe(ValueError("the prompt was: secret"))
    assert (status, body.error.code) == (500, "internal")
    assert "secret" not in body.error.message


def test_ids_are_valid_and_sort_by_time() -> None:
    ids = [new_id("job_") for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(valid_job_id(each) for each in ids)
    assert [each[:16] for each in ids] == sorted(each[:16] for each in ids)


def test_an_sse_event() -> None:
    assert sse(b"{}", event="end", event_id=7) == b"id: 7\nevent: end\ndata: {}\n\n"
