"""One choice's text as it is generated: detokenised, and cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.messages import SamplingParams
from worker.text.codec import TextCodec
from worker.text.stops import StopMatch, StopScanner


@dataclass(frozen=True, slots=True)
class TextPiece:
    """New text after one token. `finished`: a stop string, `stop`, was found; nothing more will come."""

    text: str
    finished: bool = False
    stop: str | None = None


class TextStream:
    """Turns the generated ids of one choice into text.

    Its state is a function of (prompt_ids, params, ids pushed): pushing the same ids again rebuilds it. The
    prompt only decides whether the first token continues a text; stop strings are never looked for in it, nor
    across the border between prompt and output. A stop string counts from token number `params.min_tokens`
    on.
    """

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._codec = codec
        self._params = params
        self._detokenizer = codec.detokenizer(
            skip_special=params.skip_special_tokens, continued=codec.has_text(prompt_ids)
        )
        hidden = codec.special_texts if params.skip_special_tokens and params.stop else ()
        self._scanner = StopScanner(params.stop, hidden)
        self._num_tokens = 0
        self._length = 0  # visible characters so far
        self._tail = ""  # the last of them, not handed out yet
        self._end: TextPiece | None = None
        self._flushed = False

    def push(self, token_id: int) -> TextPiece:
        """The text that `token_id` makes certain. After the end every push gives an empty, finished piece."""
        if self._end is not None:
            return self._end
        self._num_tokens += 1
        match = self._read(token_id)
        if match is not None:
            return self._stop(match)
        return TextPiece(self._take(self._scanner.settled(self._length)))

    def finish(self) -> str:
        """The text still held back, once: after the last token, when no stop string has ended the choice."""
        if self._end is not None or self._flushed:
            return ""
        self._flushed = True
        return self._take(self._length) + self._detokenizer.finish()

    def _read(self, token_id: int) -> StopMatch | None:
        may_stop = self._num_tokens >= self._params.min_tokens
        if self._detokenizer.hides(token_id):
            return self._scanner.push(self._codec.token_text(token_id), hidden=True, may_stop=may_stop)
        text = self._detokenizer.push(token_id)
        self._tail += text
        self._length += len(text)
        return self._scanner.push(text, may_stop=may_stop)

    def _stop(self, match: StopMatch) -> TextPiece:
        text = self._take(match.start) + (match.stop if self._params.include_stop else "")
        self._tail = ""
        self._end = TextPiece("", finished=True, stop=match.stop)
        return TextPiece(text, finished=True, stop=match.stop)

    def _take(self, offset: int) -> str:
        """Hands out the text up to visible character `offset`."""
        count = len(self._tail) - (self._length - offset)
        text, self._tail = self._tail[:count], self._tail[count:]
        return text
