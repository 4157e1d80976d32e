"""The runner: prompt log-probabilities, odd plans, failures that stay alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.messages import SamplingParams
from worker.engine.plan import SamplePlan, SequencePlan, StepPlan
from worker.model.runner import ModelRunner


@pytest.fixture(scope="module")
def model(kit: SimpleNamespace) -> tuple[ModelRunner, Any]:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    loaded, plain = kit.tiny_model(config)
    return ModelRunner(loaded, num_blocks=20, block_size=16), plain


GREEDY = SamplePlan(SamplingParams(temperature=0.0, logprobs=0), 0, 0, 0, (), (), False)


def prompt_scores(runner: ModelRunner, prompt: list[int], chunk: int) -> list[Any]:
    """Scores of prompt[1:], as the scheduler asks for them chunk by chunk."""
    scored: list[Any] = []
    for start in range(0, len(prompt), chunk):
        ids = prompt[start : start + chunk]
        after = prompt[start + chunk] if start + chunk < len(prompt) else None
        sample = GREEDY if after is None else None
        plan = SequencePlan(4, ids, start, [3, 9, 5, 1, 0], sample, 2, after)
        scored += runner.run(StepPlan(0, (plan,))).prompt_logprobs[4] if len(ids) > 1 or after else ()
    return scored


def test_prompt_logprobs_are_those_of_the_model(model: tuple[ModelRunner, Any]) -> None:
    runner, plain = model
    prompt = torch.randint(101, (77,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = plain(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    whole = prompt_scores(runner, prompt, 100)
    assert [s.token_id for s in whole] == prompt[1:]
    for row, scored in zip(expected, whole, strict=False):
        assert abs(float(row[scored.token_id]) - scored.logprob) < 1e-3
        assert len(scored.top) == 2
        assert scored.top[0][1] >= scored.top[1][1]


@pytest.mark.parametrize("chunk", [1, 2, 19, 76])
def test_prompt_logprobs_do_not_depend_on_the_chunks(model: tuple[ModelRunner, Any], chunk: int) -> None:
    runner, _ = model
    prompt = torch.randint(101, (77,), generator=torch.Generator().manual_seed(1)).tolist()
    assert prompt_scores(runner, prompt, chunk) == prompt_scores(runner, prompt, 100)


def test_a_chunk_that_ends_before_the_prompt_draws_nothing(model: tuple[ModelRunner, Any]) -> None:
    runner, _ = model
    plan = SequencePlan(1, [3, 4, 5], 0, [2], None)
    result = runner.run(StepPlan(0, (plan,)))
    assert (result.sampled, result.failed, result.prompt_logprobs) == ({}, {}, {})


def test_an_empty_plan(model: tuple[ModelRunner, Any]) -> None:
    assert model[0].run(StepPlan(0, ())).sampled == {}


@pytest.mark.parametrize(
    "plan",
    [
        SequencePlan(1, [], 0, [2], GREEDY),
        SequencePlan(1, [5] * 17, 0, [2], GREEDY),
        SequencePlan(1, [5], 16, [2], GREEDY),
    ],
)
def test_a_table_that_does_not_cover_its_tokens_is_an_error(
    model: tuple[ModelRunner, Any], plan: SequencePlan
) -> None:
    with pytest.raises(ValueError, match="do not cover"):
        model[0].run(StepPlan(0, (plan,)))


def test_a_request_that_bans_everything_fails_alone(model: tuple[ModelRunner, Any]) -> None:
    runner, _ = model
    bans = SamplingParams(logit_bias=dict.fromkeys(range(101), -100.0))
    bad = SamplePlan(bans, 0, 0, 0, (), (), False)
    alone = runner.run(StepPlan(0, (SequencePlan(1, [5, 6], 0, [2], GREEDY),)))
    both = runner.run(
        StepPlan(0, (SequencePlan(1, [5, 6], 0, [2], GREEDY), SequencePlan(2, [7], 0, [3], bad)))
    )
    assert both.failed[2].field == "logit_bias"
    assert both.sampled == alone.sampled


def test_threads_are_as_they_were(model: tuple[ModelRunner, Any]) -> None:
    torch.set_num_threads(2)
    model[0].run(StepPlan(0, (SequencePlan(1, [5, 6], 0, [2], GREEDY),)))
    assert torch.get_num_threads() == 2
