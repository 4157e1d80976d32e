"""The sampler: distribution, edges, independence of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import HeadraceError
from headrace.messages import SamplingParams
from worker.engine.plan import SamplePlan, ScoredToken
from worker.model.sampler import Sampler

VOCAB = 97


def plan(
    seed: int = 0,
    choice: int = 0,
    position: int = 0,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    ban: bool = False,
    **params: Any,
) -> SamplePlan:
    return SamplePlan(SamplingParams(**params), seed, choice, position, prompt, output, ban)


@dataclass
class Sampled:
    """What became of the rows, by row."""

    tokens: dict[int, ScoredToken]
    failed: dict[int, HeadraceError]


def sample(logits: torch.Tensor, plans: Sequence[SamplePlan], sampler: Sampler | None = None) -> Sampled:
    drawn = dict(enumerate((sampler or Sampler(logits.shape[1], (2,))).sample(logits, plans)))
    assert len(drawn) == len(plans)
    return Sampled(
        {i: row for i, row in drawn.items() if isinstance(row, ScoredToken)},
        {i: row for i, row in drawn.items() if isinstance(row, HeadraceError)},
    )


def tokens(logits: torch.Tensor, plans: Sequence[SamplePlan]) -> list[int]:
    result = sample(logits, plans)
    assert not result.failed
    return [result.tokens[i].token_id for i in range(len(plans))]


def some_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_uniform_logits_are_drawn_uniformly() -> None:
    draws = 9700
    logits = torch.zeros(draws, VOCAB)
    ids = tokens(logits, [plan(seed=11, position=i) for i in range(draws)])
    counts = np.bincount(ids, minlength=VOCAB)
    # 96 degrees of freedom: mean 96, standard deviation 13.9
    assert chi_square(counts, np.full(VOCAB, draws / VOCAB)) < 96 + 5 * 13.9


@pytest.mark.parametrize("key", ["seed", "choice", "position"])
def test_draws_follow_the_distribution_whatever_part_of_the_key_changes(key: str) -> None:
    draws = 6000
    row = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -3.0])
    ids = tokens(row.expand(draws, -1), [plan(temperature=0.7, **{key: i}) for i in range(draws)])
    expected = (row / 0.7).softmax(-1).double().numpy() * draws
    assert chi_square(np.bincount(ids, minlength=6), expected) < 5 + 5 * math.sqrt(10)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    rows = 40
    logits = some_logits(rows, vocab=49_152, seed=4)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"top_k": 40},
        {"top_k": 2000, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 3.0, "top_p": 0.999},
        {"logit_bias": {3: 5.0}, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    ]
    plans = [
        plan(seed=i, choice=i % 2, position=i, prompt=[1, 2, 3], output=[4, 4, i], logprobs=2, **kinds[i % 7])
        for i in range(rows)
    ]
    crowd = sample(logits, plans)
    for i in range(rows):
        alone = sample(logits[i : i + 1].clone(), [plans[i]])
        assert alone.tokens[0] == crowd.tokens[i]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [plans[i] for i in order])
    assert [shuffled.tokens[k] for k in range(rows)] == [crowd.tokens[i] for i in order]


def test_logits_are_left_as_they_were() -> None:
    logits = some_logits(3)
    before = logits.clone()
    sample(logits, [plan(top_k=3, top_p=0.5), plan(logit_bias={1: -100.0}), plan(temperature=0.0)])
    assert torch.equal(logits, before)


def test_all_ways_to_be_greedy_agree() -> None:
    logits = some_logits(12)
    best = logits.argmax(-1).tolist()
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1e-9},
        {"temperature": 9e-6, "top_p": 0.3},
        {"top_k": 1},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"temperature": 1e-4},
    ]
    for way in ways:
        assert tokens(logits, [plan(seed=i, **way) for i in range(12)]) == best, way


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(1, 49_152)
    logits[0, [700, 40_000, 301]] = 3.0
    assert tokens(logits, [plan(temperature=0.0)]) == [301]


@given(
    temperature=st.sampled_from([0.0, 1e-9, 1e-5, 1e-4, 1.0, 5.0, 100.0]),
    top_p=st.sampled_from([0.0, 1e-9, 0.5, 0.999999, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 7, VOCAB, VOCAB + 1, 10**9]),
    min_p=st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 1e4, 1e30, 3e38]),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=150, deadline=None)
def test_extremes_give_a_token_that_the_filters_allow(
    temperature: float, top_p: float, top_k: int, min_p: float, scale: float, seed: int
) -> None:
    logits = some_logits(2, scale=1.0, seed=seed % 100).clamp(-1, 1) * scale
    params = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    ids = tokens(logits, [plan(seed=seed, **params), plan(seed=seed + 1, temperature=1.0)])
    assert 0 <= ids[0] < VOCAB
    if top_k > 0:
        rank = int((logits[0] > logits[0, ids[0]]).sum())
        assert rank < top_k


def test_top_k_and_top_p_keep_what_they_say() -> None:
    row = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
    draws = 400

    def seen(**params: Any) -> set[int]:
        return set(tokens(row.expand(draws, -1), [plan(seed=i, **params) for i in range(draws)]))

    assert seen(top_k=2) == {0, 1}
    assert seen(top_p=0.69) == {0, 1}
    assert seen(top_p=0.71) == {0, 1, 2}
    assert seen(top_k=3, top_p=0.8) == {0, 1}  # of the three kept, the first two have 0.82
    assert seen(min_p=0.25) == {0, 1, 2}
    assert seen() == {0, 1, 2, 3, 4}


def test_top_p_over_a_flat_row_sorts_all_of_it() -> None:
    vocab = 5000
    row = torch.linspace(0, 1e-3, vocab)
    ids = tokens(row.expand(800, -1), [plan(seed=i, top_p=0.6) for i in range(800)])
    assert min(ids) >= vocab * 0.4 - 3  # the likeliest 60 % are the highest ids
    assert min(ids) < vocab * 0.4 + 40


def test_padded_vocabulary_is_never_chosen() -> None:
    logits = torch.zeros(50, 128)
    logits[:, 120] = 50.0
    sampler = Sampler(97, (2,))
    plans = [plan(seed=i, temperature=i % 3, logprobs=5) for i in range(50)]
    result = sample(logits, plans, sampler)
    for scored in result.tokens.values():
        assert scored.token_id < 97
        assert all(token < 97 for token, _ in scored.top)
        assert scored.logprob == pytest.approx(-math.log(97))


def test_everything_banned_fails_alone_and_names_the_field() -> None:
    logits = some_logits(3)
    bans = {i: -100.0 for i in range(VOCAB)}
    result = sample(logits, [plan(seed=1), plan(logit_bias=bans), plan(seed=3)])
    assert {i: (e.code, e.field) for i, e in result.failed.items()} == {1: ("invalid_request", "logit_bias")}
    alone = [sample(logits[i : i + 1], [plan(seed=i + 1)]).tokens[0] for i in (0, 2)]
    assert [result.tokens[0], result.tokens[2]] == alone


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_fail_their_row(value: float) -> None:
    logits = some_logits(3)
    logits[1, 5] = value
    result = sample(logits, [plan(), plan(temperature=0.0), plan(temperature=0.0)])
    assert {i: e.code for i, e in result.failed.items()} == {1: "non_finite"}
    assert set(result.tokens) == {0, 2}


def test_a_broken_parameter_fails_its_own_row() -> None:
    def broken(word: str) -> list[list[int]]:
        raise RuntimeError(word)

    logits = some_logits(2)
    result = sample(logits, [plan(bad_words=("x",)), plan()], Sampler(VOCAB, (2,), broken))
    assert result.failed[0].code == "internal"
    assert set(result.tokens) == {1}


def test_bias_penalties_and_their_order() -> None:
    row = torch.zeros(1, 8)
    row[0, :4] = torch.tensor([2.0, -1.0, 1.0, 0.5])
    # 0: bias -1.5 → 0.5, repetition 2 → 0.25, twice in the output: 0.25 - 2 · 0.1 - 0.3 = -0.25
    # 1: repetition 2 → -2; 2: in the prompt only: 1 / 2 = 0.5; 3 is untouched: 0.5 + 0.01
    got = sample(
        row,
        [
            plan(
                prompt=[1, 2],
                output=[0, 0],
                logit_bias={0: -1.5, 3: 0.01},
                repetition_penalty=2.0,
                frequency_penalty=0.1,
                presence_penalty=0.3,
                temperature=0.0,
            )
        ],
    )
    assert got.tokens[0].token_id == 3
    row[0, 2] = 1.03
    assert tokens(
        row, [plan(prompt=[1, 2], repetition_penalty=2.0, temperature=0.0, logit_bias={0: -9.0})]
    ) == [2]


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    logits = some_logits(1)
    odd = plan(
        prompt=[-1, 500],
        output=[10**6],
        repetition_penalty=1.5,
        logit_bias={-1: 9.0, 97: 9.0},
        temperature=0.0,
    )
    assert tokens(logits, [odd]) == logits.argmax(-1).tolist()


def test_bad_words_are_not_completed() -> None:
    spelled = {"cat": [[5, 6]], "dog": [[7]]}
    sampler = Sampler(VOCAB, (2,), spelled.__getitem__)
    logits = torch.zeros(3, VOCAB)
    logits[:, 6], logits[:, 7], logits[:, 8] = 3.0, 2.0, 1.0
    rows = [
        plan(output=[4, 5], bad_words=("cat", "dog"), temperature=0.0),
        plan(output=[5, 4], bad_words=("cat", "dog"), temperature=0.0),
        plan(output=[5], bad_words=("dog",), temperature=0.0),
    ]
    result = sample(logits, rows, sampler)
    assert [result.tokens[i].token_id for i in range(3)] == [8, 6, 6]


def test_bad_words_without_a_tokenizer_are_refused() -> None:
    assert sample(some_logits(1), [plan(bad_words=("x",))]).failed[0].field == "bad_words"


def test_every_end_token_is_banned_before_min_tokens() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 2], logits[:, 3], logits[:, 9], logits[:, 11] = 9.0, 8.0, 7.0, 6.0
    sampler = Sampler(VOCAB, (2, 3))
    rows = [plan(ban=True, stop_token_ids=(9,), temperature=0.0), plan(ban=False, temperature=0.0)]
    result = sample(logits, rows, sampler)
    assert [result.tokens[i].token_id for i in range(2)] == [11, 2]


def test_logprobs_are_the_model_s_own() -> None:
    logits = some_logits(1)
    expected = logits[0].log_softmax(-1)
    bias = {4: 100.0}
    scored = sample(logits, [plan(temperature=0.3, logit_bias=bias, logprobs=3)]).tokens[0]
    assert scored.token_id == 4
    assert scored.logprob == float(expected[4])
    best = expected.argsort(descending=True)[:3].tolist()
    assert scored.top == tuple((i, float(expected[i])) for i in best)


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), []).tokens == {}
