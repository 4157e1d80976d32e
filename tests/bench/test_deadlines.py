"""The figures of the benchmark of shadow admission: which refusals would have been wrong."""

from __future__ import annotations

from benchmarks.deadlines import Verdict, summary


def test_rates_are_shares_of_what_they_are_named_after() -> None:
    verdicts = [Verdict(late=False, met=True)] * 6 + [Verdict(late=True, met=True)] * 2
    verdicts += [Verdict(late=True, met=False)] * 6 + [Verdict(late=False, met=False)] * 2
    figures = summary(verdicts, {"shadow:jobs": 16})
    assert (figures["false_refusals"], figures["false_refusal_rate"]) == (2, 0.25)
    assert figures["share_of_refusals_false"] == 0.25
    assert (figures["missed_unforeseen"], figures["missed_unforeseen_rate"]) == (2, 0.25)
    assert figures["shadow:jobs"] == 16


def test_nothing_to_judge_is_no_error() -> None:
    assert summary([], {})["false_refusal_rate"] == 0
