"""Log-probabilities in OpenAI's two shapes: a list of objects (chat), four parallel lists (completions)."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from gateway.openai.schema import ChatLogprob, ChatLogprobs, TextLogprobs, TopLogprob
from headrace.messages import TokenLogprob


def token_text(raw: bytes) -> str:
    """The token as text; bytes that are only part of a character are written out, as OpenAI does."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_logprob(token) for token in tokens])


def _chat_logprob(token: TokenLogprob) -> ChatLogprob:
    top = [TopLogprob(token=token_text(bytes(t.b)), logprob=t.lp, bytes=t.b) for t in token.top]
    return ChatLogprob(token=token_text(bytes(token.b)), logprob=token.lp, bytes=token.b, top_logprobs=top)


class TextOffsets:
    """Builds one choice's lists piece by piece; the character offset goes on from piece to piece."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def lists(
        self, tokens: Sequence[TokenLogprob | None], *, with_top: bool, first: bytes = b""
    ) -> TextLogprobs:
        """None stands for a prompt's first token, which has no probability; `first` are its bytes."""
        raw = [bytes(token.b) if token else first for token in tokens]
        top = [_by_text(token.top) if token else None for token in tokens]
        return TextLogprobs(
            tokens=[token_text(each) for each in raw],
            token_logprobs=[token.lp if token else None for token in tokens],
            top_logprobs=top if with_top else None,
            text_offset=[self._advance(each) for each in raw],
        )

    def _advance(self, raw: bytes) -> int:
        start = self._characters
        self._characters += len(self._decoder.decode(raw))
        return start


def _by_text(top: Iterable[TokenLogprob]) -> dict[str, float]:
    # Different tokens may have the same text: the likelier one, which comes first, stays.
    found: dict[str, float] = {}
    for token in top:
        found.setdefault(token_text(bytes(token.b)), token.lp)
    return found


def first_token_bytes(prompt: str, tokens: Sequence[TokenLogprob | None]) -> bytes:
    """What the tokens after the first leave of the prompt; nothing, if the first stands for no text."""
    whole = prompt.encode()
    rest = b"".join(bytes(token.b) for token in tokens if token)
    return whole[: len(whole) - len(rest)] if whole.endswith(rest) else b""
