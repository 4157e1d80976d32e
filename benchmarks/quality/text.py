"""The text that quality is measured on: Python's language reference, which comes with every interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from pydoc_data.topics import topics

from worker.text.codec import TextCodec

WINDOW_TOKENS = 1024


class TextError(Exception):
    """There is not as much text as was asked for."""


def reference_text() -> str:
    """The topics of `help()`, by name: about 465,000 characters of prose and code. Python's releases differ
    in it, so perplexities are compared within one run, like speeds."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def windows_of(codec: TextCodec, count: int, size: int = WINDOW_TOKENS) -> Sequence[Sequence[int]]:
    """`count` windows of `size` tokens, one behind the other. Raises TextError."""
    ids = codec.encode_prompt(reference_text())
    if len(ids) < count * size:
        raise TextError(f"the text has {len(ids)} tokens: at most {len(ids) // size} windows of {size}")
    return [ids[n * size : (n + 1) * size] for n in range(count)]
