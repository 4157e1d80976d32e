"""Keeps control tokens that are spelt inside messages apart from those the template writes.

The strings of the messages are fenced with two characters that none of them contains; what the template makes
of them is then split at the fences. A fence whose partner the template has cut off only keeps its two sides
apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import HeadraceError

_FENCE_CHARS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))  # noncharacters: never in ordinary text


@dataclass(frozen=True, slots=True)
class RenderedPiece:
    """A stretch of the rendered chat. `plain`: from a message, and not to be read for control tokens."""

    text: str
    plain: bool


class ControlTexts:
    """The spellings of a model's control tokens, prepared for searching."""

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted(set(texts), key=len, reverse=True)
        self.any_of = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.heads = frozenset(text[:n] for text in longest_first for n in range(1, len(text)))
        self.tails = frozenset(text[n:] for text in longest_first for n in range(1, len(text)))
        self.max_part = max(map(len, longest_first), default=1) - 1
        self.first_chars = sorted({text[0] for text in longest_first if text})

    def count(self, pieces: Iterable[RenderedPiece]) -> int:
        """Control tokens that will be read as such."""
        return sum(len(self.any_of.findall(piece.text)) for piece in pieces if not piece.plain)


class Fence:
    """Fences for the strings of one chat."""

    def __init__(self, opening: str, closing: str, controls: ControlTexts) -> None:
        self._opening, self._closing, self._controls = opening, closing, controls
        self._fenced = re.compile(f"{opening}({controls.any_of.pattern}){closing}|[{opening}{closing}]")

    @classmethod
    def around(cls, content: object, controls: ControlTexts) -> Fence:
        """A fence of characters that `content` is free of. Raises HeadraceError when there are none."""
        opening, closing = _free_chars(content, 2)
        return cls(opening, closing, controls)

    def guard(self, value: Any) -> Any:
        """`value` with every string in it fenced; keys are left as they are."""
        return _map_strings(value, self._guard_text)

    def _guard_text(self, text: str) -> str:
        guarded = self._controls.any_of.sub(f"{self._opening}\\g<0>{self._closing}", text)
        # Half a control token at an end could be completed by what the template or the next message writes
        # there.
        part_lengths = range(1, min(self._controls.max_part, len(text)) + 1)
        if any(text[:n] in self._controls.tails for n in part_lengths):
            guarded = self._opening + guarded
        if any(text[-n:] in self._controls.heads for n in part_lengths):
            guarded += self._closing
        return guarded

    def split(self, rendered: str) -> list[RenderedPiece]:
        """The rendered chat without its fences, in pieces that may hold control tokens or may not."""
        parts = self._fenced.split(rendered)
        pieces = [RenderedPiece(text or "", plain=i % 2 == 1) for i, text in enumerate(parts)]
        return [piece for piece in pieces if piece.text]


class Mask:
    """Stands another character for the first one of every control token, in the strings of one chat.

    However a template cuts and joins them, no control token can come of it. The characters come back as
    pieces of their own, which costs the tokens they would have joined: only for chats that need it.
    """

    def __init__(self, shown: Mapping[str, str]) -> None:
        self._shown = dict(shown)  # stand-in to character
        self._table = str.maketrans({char: stand_in for stand_in, char in shown.items()})
        self._stand_ins = re.compile(f"([{''.join(shown)}])")

    @classmethod
    def of(cls, content: object, controls: ControlTexts) -> Mask | None:
        """None when no string of `content` has such a character. Raises HeadraceError as `Fence.around`."""
        used = _chars_of(content)
        risky = [char for char in controls.first_chars if char in used]
        if not risky:
            return None
        return cls(dict(zip(_free_chars(content, len(risky)), risky, strict=True)))

    def guard(self, value: Any) -> Any:
        return _map_strings(value, lambda text: text.translate(self._table))

    def split(self, rendered: str) -> list[RenderedPiece]:
        parts = self._stand_ins.split(rendered)
        pieces = [
            RenderedPiece(self._shown.get(text, text), plain=i % 2 == 1) for i, text in enumerate(parts)
        ]
        return [piece for piece in pieces if piece.text]


def _chars_of(content: object) -> set[str]:
    return set().union(*map(set, _strings(content)))


def _free_chars(content: object, count: int) -> list[str]:
    used = _chars_of(content)
    free = [char for char in _FENCE_CHARS if char not in used]
    if len(free) < count:
        raise HeadraceError(
            "invalid_request",
            "The messages contain too many of the characters U+FDD0 to U+FDEF.",
            "messages",
        )
    return free[:count]


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
