"""Stop strings over a stream of text: the match completed first wins, and no more is held back than must be.

Matching is Knuth, Morris and Pratt's, one automaton for each string, so that the result does not depend on
how the text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Stop string `stop` stands at characters [start, end) of the stream."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """Finds the stop string completed first, the longest of those that end together. Ignores empty ones."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._fallbacks = tuple(_fallback_table(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each stop that the stream now ends with
        self.length = 0  # characters seen

    def __bool__(self) -> bool:
        return bool(self._stops)

    @property
    def held(self) -> int:
        """How many of the last characters may still become part of a stop string."""
        return max(self._matched, default=0)

    def push(self, text: str, *, may_stop: bool = True) -> StopMatch | None:
        """Reads on; the first complete match, if any. With `may_stop` off, matches are passed over."""
        if not self._stops:
            self.length += len(text)
            return None
        for char in text:
            self.length += 1
            match = self._step(char)
            if match is not None and may_stop:
                return match
        return None

    def _step(self, char: str) -> StopMatch | None:
        longest: str | None = None
        for i, stop in enumerate(self._stops):
            matched = self._advance(i, char)
            if matched == len(stop):
                longest = stop if longest is None or len(stop) > len(longest) else longest
                matched = self._fallbacks[i][matched]
            self._matched[i] = matched
        return None if longest is None else StopMatch(longest, self.length - len(longest), self.length)

    def _advance(self, i: int, char: str) -> int:
        stop, fallback, matched = self._stops[i], self._fallbacks[i], self._matched[i]
        while matched and stop[matched] != char:
            matched = fallback[matched]
        return matched + 1 if stop[matched] == char else 0


def _fallback_table(stop: str) -> list[int]:
    """For each length of a matched prefix, the length of the next shorter prefix that is also its suffix."""
    table = [0, 0]
    for char in stop[1:]:
        shorter = table[-1]
        while shorter and stop[shorter] != char:
            shorter = table[shorter]
        table.append(shorter + 1 if stop[shorter] == char else 0)
    return table


class StopScanner:
    """Stop strings over a text in which some tokens are hidden from the reader.

    A stop string that names a special token (`<|im_end|>`) is looked for in the text with the hidden tokens
    written out, every other one in what the reader sees. All offsets given out count visible characters.
    """

    def __init__(self, stops: Iterable[str], hidden_texts: Iterable[str]) -> None:
        hidden = tuple(text for text in hidden_texts if text)
        stops = tuple(stops)
        names_hidden = [any(text in stop for text in hidden) for stop in stops]
        self._visible = StopMatcher(s for s, names in zip(stops, names_hidden, strict=True) if not names)
        self._whole = StopMatcher(s for s, names in zip(stops, names_hidden, strict=True) if names)
        self._hidden_spans: list[tuple[int, int]] = []  # of the whole stream, oldest first
        self._hidden_before = 0  # hidden characters in spans already forgotten

    def push(self, text: str, *, hidden: bool = False, may_stop: bool = True) -> StopMatch | None:
        """Reads on, visible text or the spelling of a hidden token; the match completed first, if any."""
        whole = self._push_whole(text, hidden, may_stop) if self._whole else None
        visible = None if hidden else self._visible.push(text, may_stop=may_stop)
        matches = [match for match in (visible, whole) if match is not None]
        return min(matches, key=lambda match: (match.end, match.start), default=None)

    def settled(self, length: int) -> int:
        """How many of the `length` visible characters so far can no longer become part of a stop string."""
        settled = length - self._visible.held
        if self._whole:
            settled = min(settled, self._to_visible(self._whole.length - self._whole.held))
        return settled

    def _push_whole(self, text: str, hidden: bool, may_stop: bool) -> StopMatch | None:
        start = self._whole.length
        if hidden:
            self._hidden_spans.append((start, start + len(text)))
        match = self._whole.push(text, may_stop=may_stop)
        if match is not None:
            return StopMatch(match.stop, self._to_visible(match.start), self._to_visible(match.end))
        self._forget_spans(self._whole.length - self._whole.held)
        return None

    def _to_visible(self, offset: int) -> int:
        hidden = sum(min(end, offset) - start for start, end in self._hidden_spans if start < offset)
        return offset - self._hidden_before - hidden

    def _forget_spans(self, offset: int) -> None:
        while self._hidden_spans and self._hidden_spans[0][1] <= offset:
            start, end = self._hidden_spans.pop(0)
            self._hidden_before += end - start
