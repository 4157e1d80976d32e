"""What each token adds to the text, as bytes, so that text can be streamed without decoding it twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

_BLANK = "▁"  # SentencePiece writes a space so
_SPM_STEPS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
PieceOf = Callable[[str, bool], bytes]


class PieceTable:
    """The bytes of every token of one tokenizer, computed on first use.

    Three kinds of decoder are told apart by the tokenizer's own description: byte-level BPE (a token is a
    string of bytes), SentencePiece with or without byte fallback, and the rest (WordPiece and others), whose
    own decoder is asked for what a token adds behind another one.
    """

    def __init__(self, tokenizer: Tokenizer, decoder_spec: Mapping[str, Any] | None) -> None:
        steps = _flatten(decoder_spec)
        self._tokenizer = tokenizer
        self._piece_of = _choose(tokenizer, steps)
        self._first: dict[int, bytes] = {}
        self._later: dict[int, bytes] = {}
        self.num_leading_spaces_dropped = _leading_spaces_dropped(steps)

    def knows(self, token_id: int) -> bool:
        return token_text(self._tokenizer, token_id) is not None

    def bytes_of(self, token_id: int, *, first: bool = False) -> bytes:
        """What `token_id` adds to the text; `first`: nothing stands before it. Unknown ids add nothing."""
        known = self._first if first else self._later
        piece = known.get(token_id)
        if piece is None:
            text = token_text(self._tokenizer, token_id)
            piece = known[token_id] = b"" if text is None else self._piece_of(text, first)
        return piece


def token_text(tokenizer: Tokenizer, token_id: int) -> str | None:
    """The token as the vocabulary spells it; None for an id outside it (a padded row of the model's head)."""
    return tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None


def _flatten(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [step for inner in spec["decoders"] for step in _flatten(inner)]
    return [spec]


def _choose(tokenizer: Tokenizer, steps: Sequence[Mapping[str, Any]]) -> PieceOf:
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level()
    if steps and kinds <= _SPM_STEPS:
        return _sentencepiece(steps)
    if kinds == {"BPEDecoder"}:  # a word's last token ends with the suffix; the text keeps its last space
        suffix = steps[0]["suffix"]
        return lambda text, first: text.replace(suffix, " ").encode()
    if steps:
        return _behind_another(tokenizer)
    return lambda text, first: (text if first else " " + text).encode()


def _byte_level() -> PieceOf:
    byte_of = byte_level_alphabet()

    def piece_of(text: str, first: bool) -> bytes:
        try:
            return bytes([byte_of[char] for char in text])
        except KeyError:  # an added token, spelt as it is
            return text.encode()

    return piece_of


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, reversed: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelt = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    return spelt | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _sentencepiece(steps: Sequence[Mapping[str, Any]]) -> PieceOf:
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)
    edits = [edit for step in _before_fuse(steps) if (edit := _edit(step)) is not None]

    def piece_of(text: str, first: bool) -> bytes:
        if has_bytes and (byte := _fallback_byte(text)) is not None:
            return bytes([byte])
        for edit in edits:
            text = edit(text, first)
        return text.encode()

    return piece_of


def _before_fuse(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps that work on each token: all but a Strip after Fuse, which sees the whole text."""
    kinds = [step["type"] for step in steps]
    fused_at = kinds.index("Fuse") if "Fuse" in kinds else len(steps)
    return [step for i, step in enumerate(steps) if i < fused_at or step["type"] != "Strip"]


def _leading_spaces_dropped(steps: Sequence[Mapping[str, Any]]) -> int:
    on_whole_text = [step for step in steps if step not in _before_fuse(steps)]
    return sum(int(step["start"]) for step in on_whole_text if step["content"] == " ")


def _edit(step: Mapping[str, Any]) -> Callable[[str, bool], str] | None:
    if step["type"] == "Replace" and "String" in step["pattern"]:
        old, new = step["pattern"]["String"], step["content"]
        return lambda text, first: text.replace(old, new)
    if step["type"] == "Metaspace":
        blank, drops_first = step.get("replacement", _BLANK), step.get("prepend_scheme", "always") != "never"
        return lambda text, first: text.replace(blank, "" if first and drops_first else " ")
    if step["type"] == "Strip":
        content, count = step["content"], int(step["start"])
        return lambda text, first: _strip_start(text, content, count)
    return None


def _strip_start(text: str, content: str, count: int) -> str:
    while count > 0 and text.startswith(content):
        text, count = text[len(content) :], count - 1
    return text


def _fallback_byte(text: str) -> int | None:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return int(text[3:5], 16)
        except ValueError:
            return None
    return None


def _behind_another(tokenizer: Tokenizer) -> PieceOf:
    decoder, anchor = tokenizer.decoder, "x"
    anchored = decoder.decode([anchor])

    def piece_of(text: str, first: bool) -> bytes:
        if first:
            return decoder.decode([text]).encode()
        return decoder.decode([anchor, text]).removeprefix(anchored).encode()

    return piece_of
