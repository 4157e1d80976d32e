"""Events of which only a word is new: encoded once, and the word spliced in."""

from __future__ import annotations

from typing import Any

import msgspec

_NUL = b"\0"  # encoded JSON has none: it is escaped in strings
HOLE: Any = msgspec.Raw(_NUL)


class Template:
    """An event that is the same every time but for what goes into its `HOLE`s, encoded once."""

    def __init__(self, encoded: bytes) -> None:
        self._head, *self._rest = encoded.split(_NUL)

    def fill(self, *values: str | int) -> bytes:
        """The event with a value for each hole, in order: what encoding it as a whole would have given."""
        pieces = [self._head]
        for value, after in zip(values, self._rest, strict=True):
            pieces += (msgspec.json.encode(value), after)
        return b"".join(pieces)
