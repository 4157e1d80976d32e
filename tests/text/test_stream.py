"""One choice's text: what a reader sees, step by step, and the same again after a take-over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.messages import SamplingParams
from worker.text.codec import TextCodec
from worker.text.stream import TextPiece, TextStream

PROMPT = [1]


def run(codec: TextCodec, ids: list[int], **params: Any) -> tuple[list[str], TextPiece]:
    """Each push's text, the finish last, and the piece that ended it (or the last one)."""
    stream = TextStream(codec, PROMPT, SamplingParams(**params))
    pieces: list[TextPiece] = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if pieces[-1].finished:
            break
    return [*(piece.text for piece in pieces), stream.finish()], pieces[-1]


def chars(codec: TextCodec, text: str) -> list[int]:
    """One token a byte."""
    by_bytes = {codec.token_bytes(i): i for i in reversed(range(codec.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def test_a_stop_over_several_tokens_never_shows_its_beginning(byte_codec: TextCodec) -> None:
    texts, last = run(byte_codec, chars(byte_codec, "ABC DEFGHIJKL"), stop=("DEFGHIJ",))
    assert texts == ["A", "B", "C", " ", "", "", "", "", "", "", "", ""]
    assert last == TextPiece("", finished=True, stop="DEFGHIJ")


def test_text_that_cannot_be_a_stop_comes_in_its_own_step(byte_codec: TextCodec) -> None:
    texts, last = run(byte_codec, chars(byte_codec, "abcZZZ"), stop=("Z" * 10,))
    assert texts == ["a", "b", "c", "", "", "", "ZZZ"]
    assert not last.finished


def test_a_beginning_that_turns_out_otherwise_is_let_go(byte_codec: TextCodec) -> None:
    texts, _ = run(byte_codec, chars(byte_codec, "xENxEND"), stop=("END",))
    assert texts == ["x", "", "", "ENx", "", "", "", ""]


@pytest.mark.parametrize("include_stop", [False, True])
def test_include_stop(include_stop: bool, byte_codec: TextCodec) -> None:
    texts, last = run(byte_codec, chars(byte_codec, "ab--cd"), stop=("--",), include_stop=include_stop)
    assert "".join(texts) == ("ab--" if include_stop else "ab")
    assert last.stop == "--"


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("skip_special", [False, True])
def test_a_stop_equal_to_a_special_token(
    include_stop: bool, skip_special: bool, byte_codec: TextCodec
) -> None:
    assert byte_codec.eos_id is not None
    ids = [*chars(byte_codec, "ab"), byte_codec.eos_id, *chars(byte_codec, "cd")]
    texts, last = run(
        byte_codec, ids, stop=("<|im_end|>",), skip_special_tokens=skip_special, include_stop=include_stop
    )
    assert "".join(texts) == ("ab<|im_end|>" if include_stop else "ab")
    assert last.stop == "<|im_end|>"


@pytest.mark.parametrize(("skip_special", "expected"), [(True, "abcd"), (False, "ab<|im_end|>cd")])
def test_special_tokens_are_shown_only_when_asked_for(
    skip_special: bool, expected: str, byte_codec: TextCodec
) -> None:
    assert byte_codec.eos_id is not None
    ids = [*chars(byte_codec, "ab"), byte_codec.eos_id, *chars(byte_codec, "cd")]
    texts, _ = run(byte_codec, ids, skip_special_tokens=skip_special)
    assert "".join(texts) == expected


def test_a_stop_is_not_looked_for_in_the_prompt_or_over_its_border(byte_codec: TextCodec) -> None:
    stream = TextStream(byte_codec, chars(byte_codec, "say STOP now ST"), SamplingParams(stop=("STOP",)))
    pieces = [stream.push(token_id) for token_id in chars(byte_codec, "OP go on")]
    assert "".join(piece.text for piece in pieces) == "OP go on"


def test_a_stop_counts_from_min_tokens_on(byte_codec: TextCodec) -> None:
    ids = chars(byte_codec, ".a.b.c")
    assert "".join(run(byte_codec, ids, stop=(".",), min_tokens=3)[0]) == ".a"
    assert "".join(run(byte_codec, ids, stop=(".",), min_tokens=4)[0]) == ".a.b"
    assert "".join(run(byte_codec, ids, stop=(".",))[0]) == ""


def test_half_a_character_at_the_end_is_flushed_once(byte_codec: TextCodec) -> None:
    stream = TextStream(byte_codec, PROMPT, SamplingParams(stop=("never",)))
    ids = chars(byte_codec, "n😀")[:-1]
    assert "".join(stream.push(token_id).text for token_id in ids) == ""
    assert stream.finish() == "n\ufffd"
    assert stream.finish() == ""


def test_nothing_comes_after_the_end(byte_codec: TextCodec) -> None:
    stream = TextStream(byte_codec, PROMPT, SamplingParams(stop=("b",)))
    assert [stream.push(token_id).text for token_id in chars(byte_codec, "abcd")] == ["a", "", "", ""]
    assert stream.push(chars(byte_codec, "e")[0]) == TextPiece("", finished=True, stop="b")
    assert stream.finish() == ""


def test_a_sentencepiece_answer_begins_with_its_space(
    spm_codec: TextCodec, spell: Callable[[TextCodec, list[str]], list[int]]
) -> None:
    ids = spell(spm_codec, ["▁the", "▁a", "▁▁", "he"])
    behind_text = TextStream(spm_codec, spm_codec.encode_prompt("a"), SamplingParams())
    behind_bos = TextStream(spm_codec, [1], SamplingParams())
    assert [behind_text.push(i).text for i in ids] == [" the", " a", "  ", "he"]
    assert [behind_bos.push(i).text for i in ids] == ["the", " a", "  ", "he"]


PARAMS = st.builds(
    SamplingParams,
    stop=st.lists(
        st.sampled_from(["ab", "b", "é", "", "<|im_end|>", "a<|im_end|>b", "\n\n", "aab"]), max_size=3
    ).map(tuple),
    include_stop=st.booleans(),
    skip_special_tokens=st.booleans(),
    min_tokens=st.integers(0, 4),
)


@given(data=st.data(), params=PARAMS)
def test_the_pieces_are_the_whole_text_up_to_the_first_stop(
    data: st.DataObject, params: SamplingParams, byte_codec: TextCodec
) -> None:
    alphabet = [*chars(byte_codec, "aab\né😀"), *sorted(byte_codec.special_ids)]
    ids = data.draw(st.lists(st.sampled_from(alphabet), max_size=25))
    stream = TextStream(byte_codec, PROMPT, params)
    pieces = [stream.push(token_id) for token_id in ids]
    joined = "".join(piece.text for piece in pieces) + stream.finish()
    whole = byte_codec.decode(ids, skip_special=params.skip_special_tokens)
    stopped = next((piece for piece in pieces if piece.finished), None)
    if stopped is None:
        assert joined == whole
    else:
        text = joined.removesuffix(stopped.stop or "") if params.include_stop else joined
        assert whole.startswith(text)
        assert pieces.index(stopped) + 1 >= params.min_tokens
        seen = byte_codec.decode(ids, skip_special=False)
        assert (stopped.stop or "?") in seen + whole


@given(data=st.data(), params=PARAMS, cut=st.integers(0, 25))
def test_a_stream_built_again_goes_on_as_the_first_one(
    data: st.DataObject, params: SamplingParams, cut: int, byte_codec: TextCodec
) -> None:
    alphabet = [*chars(byte_codec, "aab\né😀"), *sorted(byte_codec.special_ids)]
    ids = data.draw(st.lists(st.sampled_from(alphabet), max_size=25))
    undisturbed, taken_over = (TextStream(byte_codec, PROMPT, params) for _ in range(2))
    expected = [undisturbed.push(token_id) for token_id in ids]
    for token_id in ids[:cut]:
        taken_over.push(token_id)
    assert [taken_over.push(token_id) for token_id in ids[cut:]] == expected[cut:]
    assert taken_over.finish() == undisturbed.finish()
