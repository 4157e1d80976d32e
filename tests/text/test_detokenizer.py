"""Text in pieces is the text of the whole, for every family of tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from worker.text.codec import TextCodec

TEXTS = [
    "plain words, and more of them",
    "  two  spaces   and\ttabs\n\n",
    "naïve café, straße, e\u0301 and a\u0308\u0301\u0323",
    "漢字かな交じり文、그리고 한국어",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, 🇨🇭",
    "עברית and العربية",
    "\u0000\u0007 control and \ufffd itself",
]


def streamed(codec: TextCodec, ids: list[int], **options: bool) -> list[str]:
    detokenizer = codec.detokenizer(**{"skip_special": True, "continued": False, **options})
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("family", ["byte_level", "wordpiece", "word_level", "metaspace"])
@given(data=st.data())
def test_any_ids_decode_as_the_tokenizer_itself_does(
    family: str,
    skip_special: bool,
    data: st.DataObject,
    codecs_by_family: dict[str, TextCodec],
    tokenizers_by_family: dict[str, Tokenizer],
) -> None:
    codec, tokenizer = codecs_by_family[family], tokenizers_by_family[family]
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size + 3), max_size=40))
    expected = tokenizer.decode(ids, skip_special_tokens=skip_special)
    assert "".join(streamed(codec, ids, skip_special=skip_special)) == expected


@given(data=st.data())
def test_sentencepiece_ids_decode_as_the_tokenizer_itself_does(
    data: st.DataObject, codecs_by_family: dict[str, TextCodec], tokenizers_by_family: dict[str, Tokenizer]
) -> None:
    codec, tokenizer = codecs_by_family["sentencepiece"], tokenizers_by_family["sentencepiece"]
    words = st.lists(st.integers(259, codec.vocab_size - 1), max_size=8)
    whole_characters = st.text(st.characters(codec="utf-8"), max_size=5).map(
        lambda t: [3 + b for b in t.encode()]
    )
    ids = [i for part in data.draw(st.lists(words | whole_characters, max_size=8)) for i in part]
    assert "".join(streamed(codec, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
@given(text=st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(TEXTS))
def test_every_text_comes_back_and_no_piece_holds_half_a_character(
    family: str, text: str, codecs_by_family: dict[str, TextCodec]
) -> None:
    codec = codecs_by_family[family]
    text = text.replace("▁", "_")  # which SentencePiece cannot tell from a space
    ids = codec.encode_prompt(text)
    pieces = streamed(codec, ids)
    assert "".join(pieces) == codec.decode(ids)
    if not any(special in text for special in codec.special_texts):
        assert "".join(pieces) == text
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece", "metaspace", "wordpiece"])
@given(data=st.data())
def test_token_bytes_concatenate_to_the_text(
    family: str, data: st.DataObject, codecs_by_family: dict[str, TextCodec]
) -> None:
    codec = codecs_by_family[family]
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size - 1), max_size=30))
    joined = b"".join(map(codec.token_bytes, ids))
    text = codec.decode(ids, skip_special=False, continued=True)
    assert text == joined.decode(errors="replace")


@given(ids=st.lists(st.integers(0, 280), max_size=30), cut=st.integers(0, 30))
def test_text_up_to_a_cut_never_changes_afterwards(
    ids: list[int], cut: int, codecs_by_family: dict[str, TextCodec]
) -> None:
    codec = codecs_by_family["byte_level"]
    assert "".join(streamed(codec, ids)).startswith("".join(streamed(codec, ids[:cut])[:-1]))


def test_words_with_their_ends_in_the_vocabulary(
    codecs_by_family: dict[str, TextCodec], tokenizers_by_family: dict[str, Tokenizer]
) -> None:
    ids = [1, 2, 3, 4, 1]
    assert codecs_by_family["word_ends"].decode(ids) == "hello world ahello "
    assert tokenizers_by_family["word_ends"].decode(ids) == "hello world ahello"


def test_an_emoji_in_four_tokens_comes_out_whole(byte_codec: TextCodec) -> None:
    detokenizer = byte_codec.detokenizer(skip_special=True, continued=True)
    ids = [i for byte in "😀".encode() for i in byte_ids(byte_codec, byte)]
    assert [detokenizer.push(i) for i in ids] == ["", "", "", "😀"]
    assert detokenizer.finish() == ""


def test_half_a_character_is_flushed_once_at_the_very_end(byte_codec: TextCodec) -> None:
    detokenizer = byte_codec.detokenizer(skip_special=True, continued=True)
    ids = [i for byte in "a😀".encode()[:3] for i in byte_ids(byte_codec, byte)]
    assert "".join(map(detokenizer.push, ids)) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_sentencepiece_keeps_the_leading_space_behind_a_prompt_only(spm_codec: TextCodec) -> None:
    ids = spm_codec.encode_prompt("the  a the")
    assert spm_codec.decode(ids) == "the  a the"
    assert spm_codec.decode(ids, continued=True) == " the  a the"


def test_hidden_special_tokens_do_not_break_the_character_around_them(byte_codec: TextCodec) -> None:
    first, *rest = [i for byte in "é".encode() for i in byte_ids(byte_codec, byte)]
    assert byte_codec.eos_id is not None
    assert byte_codec.decode([first, byte_codec.eos_id, *rest]) == "é"


def test_ids_outside_the_vocabulary_add_nothing(byte_codec: TextCodec) -> None:
    outside = [byte_codec.vocab_size, byte_codec.vocab_size + 100, -1, 2**40]
    assert byte_codec.decode(outside) == ""
    assert [byte_codec.token_bytes(i) for i in outside] == [b""] * 4


def byte_ids(codec: TextCodec, byte: int) -> list[int]:
    return [next(i for i in range(256) if codec.token_bytes(i) == bytes([byte]))]
