"""Chunks with only a new word are spliced: the bytes are those of the encoder."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from gateway.openai.chat import ChatWriter
from gateway.openai.completions import TextWriter
from gateway.openai.schema import ChatChunk, ChatChunkChoice, ChatDelta, TextChoice, TextCompletion
from gateway.openai.serve import Head
from gateway.responses.render import EventWriter
from gateway.responses.schema import ResponseBody
from gateway.stream import gathered, sse
from gateway.template import HOLE, Template
from headrace.messages import Delta

TEXTS = [
    " word",
    '"quoted", \\back\\ and /slash/',
    "\0\x01\x1f\x7f\n\r\t\u2028\u2029",
    '{"content":"","text":""}',
    "😀 Größe 漢字 e\u0301",
    "".join(map(chr, (*range(0xD800), *range(0xE000, 0xFFFE), sys.maxunicode))),
]
NAME = '\0%b%d "model":"\\", "content":"","text":""'  # of a model, as unkind as may be


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("fingerprint", [None, "fp"])
def test_chat(include_usage: bool, fingerprint: str | None) -> None:
    writer = ChatWriter(Head("chatcmpl-1", 1_700_000_000, NAME, fingerprint, 2, include_usage))

    def encoded(index: int, **delta: Any) -> bytes:
        chunk = ChatChunk(
            id="chatcmpl-1",
            created=1_700_000_000,
            model=NAME,
            system_fingerprint=fingerprint,
            choices=[ChatChunkChoice(index=index, delta=ChatDelta(**delta))],
            usage=None if include_usage else msgspec.UNSET,
        )
        return sse(msgspec.json.encode(chunk))

    for index in (1, 0):
        first = encoded(index, role="assistant", content="") + encoded(index, content=TEXTS[0])
        assert writer.delta(0, Delta(seq=1, i=index, text=TEXTS[0])) == first
        for text in TEXTS[1:]:
            assert writer.delta(0, Delta(seq=2, i=index, text=text)) == encoded(index, content=text)
        assert writer.delta(0, Delta(seq=3, i=index, ids=[7])) == b""


@pytest.mark.parametrize("include_usage", [False, True])
def test_completions(include_usage: bool) -> None:
    head = Head("cmpl-1", 1_700_000_000, NAME, "fp", 2, include_usage, echo=("a prompt", "b prompt"))
    writer = TextWriter(head, num_top=None)

    def encoded(index: int, text: str) -> bytes:
        chunk = TextCompletion(
            id="cmpl-1",
            created=1_700_000_000,
            model=NAME,
            choices=[TextChoice(index=index, text=text)],
            system_fingerprint="fp",
            usage=None if include_usage else msgspec.UNSET,
        )
        return sse(msgspec.json.encode(chunk))

    assert writer.delta(1, Delta(seq=1, i=1, ids=[7])) == encoded(3, "b prompt")
    for text in TEXTS:
        assert writer.delta(1, Delta(seq=2, i=1, text=text)) == encoded(3, text)
    assert writer.delta(1, Delta(seq=3, i=1, ids=[7])) == b""
    assert writer.delta(0, Delta(seq=4, text="x")) == encoded(0, "a promptx")


def test_responses() -> None:
    body = ResponseBody(
        id="resp_1", created_at=1, model=NAME, temperature=1.0, top_p=1.0, metadata={}, status="in_progress"
    )
    writer = EventWriter(body, after=5)
    list(writer.opening())
    for number, text in enumerate(TEXTS, 4):  # behind those of the opening and of the item's begin
        event = {
            "type": "response.output_text.delta",
            "sequence_number": number,
            "item_id": "msg_1",
            "output_index": 0,
            "content_index": 0,
            "delta": text,
            "logprobs": [],
        }
        expected = [sse(msgspec.json.encode(event), event="response.output_text.delta")] if number > 5 else []
        assert list(writer.event(Delta(seq=number, text=text))) == expected
        assert list(writer.event(Delta(seq=number, ids=[1]))) == []


def test_a_template_takes_one_value_for_each_hole() -> None:
    template = Template(msgspec.json.encode({"a": HOLE, "b": [HOLE], "c": "\0"}))
    assert msgspec.json.decode(template.fill(1, "x")) == {"a": 1, "b": ["x"], "c": "\0"}
    with pytest.raises(TypeError):
        template.fill(1)


def test_what_comes_together_is_written_together_but_not_without_bound() -> None:
    small = [b"%d\n" % number for number in range(100)]
    assert list(gathered(iter(small))) == [b"".join(small)]
    assert list(gathered([])) == []
    large = [b"x" * 20_000] * 7
    assert list(map(len, gathered(large))) == [80_000, 60_000]
