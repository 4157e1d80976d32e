"""Stop strings against a plain search over the whole text, however the text is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.stops import StopMatch, StopMatcher, StopScanner

STOPS = st.lists(st.text("ab", max_size=4), max_size=4)


def first_completed(text: str, stops: Iterable[str]) -> StopMatch | None:
    found = [(text.index(s) + len(s), text.index(s), s) for s in stops if s and s in text]
    end, start, stop = min(found, default=(0, 0, ""))
    return StopMatch(stop, start, end) if stop else None


@given(text=st.text("abc", max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=5))
def test_the_match_completed_first_wins_wherever_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher, found = StopMatcher(stops), None
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in itertools.pairwise(bounds):
        found = found or matcher.push(text[start:end])
    assert found == first_completed(text, stops)


@given(text=st.text("ab", max_size=20), stops=STOPS)
def test_exactly_the_longest_possible_beginning_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    if matcher.push(text) is None:
        possible = [n for n in range(len(text) + 1) if any(s[:n] == text[len(text) - n :] for s in stops)]
        assert matcher.held == max((n for n in possible if any(n < len(s) for s in stops)), default=0)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("xaby", ["", "a", "ab"], StopMatch("a", 1, 2)),
        ("xaby", ["ab"], StopMatch("ab", 1, 3)),
        ("xaby", ["aby", "b"], StopMatch("b", 2, 3)),
        ("caféé", ["é"], StopMatch("é", 3, 4)),
        ("one\n\ntwo", ["\n\n"], StopMatch("\n\n", 3, 5)),
        ("short", ["much longer than the output"], None),
        ("aaab", ["aab"], StopMatch("aab", 1, 4)),
        ("xab", ["b", "ab"], StopMatch("ab", 1, 3)),
        ("anything", ["", ""], None),
    ],
)
def test_stop_matrix(text: str, stops: list[str], expected: StopMatch | None) -> None:
    assert StopMatcher(stops).push(text) == expected


def test_matches_are_passed_over_until_they_may_count() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("END EN", may_stop=False) is None
    assert matcher.held == 2
    assert matcher.push("D") == StopMatch("END", 4, 7)


def test_a_stop_that_names_a_hidden_token_is_found_in_visible_offsets() -> None:
    scanner = StopScanner(["b<end>c"], ["<end>", "<other>"])
    assert scanner.push("a") is None
    assert scanner.push("<other>", hidden=True) is None
    assert scanner.push("b") is None
    assert scanner.settled(2) == 1
    assert scanner.push("<end>", hidden=True) is None
    assert scanner.push("c") == StopMatch("b<end>c", 1, 3)


def test_hidden_tokens_do_not_part_what_the_reader_sees() -> None:
    scanner = StopScanner(["stop"], ["<end>"])
    assert scanner.push("st") is None
    assert scanner.push("<end>", hidden=True) is None
    assert scanner.push("op") == StopMatch("stop", 0, 4)


def test_many_hidden_tokens_leave_no_trace() -> None:
    scanner = StopScanner(["<end>!"], ["<end>"])
    for length in range(1, 1000):
        assert scanner.push("x") is None
        assert scanner.push("<end>", hidden=True) is None
        assert scanner.settled(length) == length
    assert scanner.push("!") == StopMatch("<end>!", 999, 1000)
