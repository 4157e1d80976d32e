import math

import pytest

from benchmarks.figures import Utilisation, median_of, percentile, summarise, utilisation
from benchmarks.load import JobTimes


def test_percentiles_lie_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([5.0], 99) == 5.0
    assert percentile([0.0, 100.0], 99) == 99.0
    assert math.isnan(percentile([], 50))


def test_a_run_is_summed_up_from_what_its_readers_saw() -> None:
    early = JobTimes("a", 0.0, [0.5, 0.6, 0.8], 0.8)
    late = JobTimes("b", 1.0, [1.1, 1.4], 2.0)
    figures = summarise([early, late])
    assert (figures.output_tokens, figures.wall_s, figures.tokens_per_s) == (5, 2.0, 2.5)
    assert figures.ttft_p50_ms == pytest.approx(300)
    assert figures.itl_p50_ms == pytest.approx(200)
    assert figures.e2e_p50_s == pytest.approx(0.9)


def test_medians_are_taken_figure_by_figure() -> None:
    runs = [summarise([JobTimes("a", 0.0, [first, first + 0.1], 1.0)]) for first in (0.1, 0.7, 0.2)]
    assert median_of(runs).ttft_p50_ms == pytest.approx(200)


def test_utilisation_comes_from_how_the_sums_grew() -> None:
    before = {"step": 10, "slot_steps_used": 30, "slot_steps_total": 40}
    after = {"step": 20, "slot_steps_used": 45, "slot_steps_total": 70, "kv_block_steps_used": 9}
    assert utilisation(before, after) == Utilisation(10, 0.5, None)
