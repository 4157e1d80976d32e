"""A step that computes guesses gives the bits of one token a step, whatever was guessed."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.messages import SamplingParams
from worker.engine.budget import FixedBudget
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.outputs import TokenOutput
from worker.engine.plan import SamplePlan, ScoredToken, SequencePlan, StepPlan
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.model.runner import ModelRunner

VOCAB = 211
PARAMS = (
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, logprobs=1),
    SamplingParams(temperature=0.0, min_tokens=6, logprobs=0),
    SamplingParams(temperature=0.7, top_k=9, logit_bias={5: 3.0, 8: -100.0}, logprobs=1),
)


@pytest.fixture(scope="module", params=["fused", "packed", "fused bf16", "fused int8"])
def runner(kit: SimpleNamespace, request: pytest.FixtureRequest) -> ModelRunner:
    made: ModelRunner = kit.tiny_llama(request.param)
    return made


def alone(kit: SimpleNamespace, runner: ModelRunner, i: int, prompt: list[int], n: int) -> list[ScoredToken]:
    made = kit.Sequence(prompt, PARAMS[i % len(PARAMS)], seed=70 + i)
    scored: list[ScoredToken] = kit.Driver(runner).run([made], n)[0].scored
    return scored


def sample_plan(i: int, prompt: list[int], output: list[int]) -> SamplePlan:
    params = PARAMS[i % len(PARAMS)]
    return SamplePlan(params, 70 + i, 0, len(output), prompt, output, len(output) < params.min_tokens)


def test_right_and_wrong_guesses_in_a_crowd(kit: SimpleNamespace, runner: ModelRunner) -> None:
    """Each sequence's guesses are the truth up to a random place; all of them in the same steps."""
    rng, size, count = random.Random(1), 8, 24
    prompts = kit.make_prompts(size, VOCAB, 60)
    truth = [alone(kit, runner, i, p, count) for i, p in enumerate(prompts)]
    tables = [list(range(i * 10, i * 10 + 10)) for i in range(size)]
    told: list[list[ScoredToken]] = [[] for _ in prompts]
    computed = [0] * size
    while any(len(t) < count for t in told):
        plans = []
        for i in [i for i in range(size) if len(told[i]) < count]:
            tokens = prompts[i] + [t.token_id for t in told[i]]
            most = min(rng.choice([0, 1, 2, 5]), count - len(told[i]) - 1)
            right = [t.token_id for t in truth[i][len(told[i]) : len(told[i]) + most]]
            keep = rng.randint(0, most)
            guesses = right[:keep] + [rng.randrange(VOCAB) for _ in right[keep:]]
            sample = sample_plan(i, prompts[i], tokens[len(prompts[i]) :])
            ids = tokens[computed[i] :] + guesses
            plans.append(SequencePlan(i, ids, computed[i], tables[i], sample, num_guesses=len(guesses)))
            computed[i] = len(tokens)
        result = runner.run(StepPlan(0, tuple(plans)))
        assert not result.failed
        assert not result.spoilt
        for plan in plans:
            behind = result.guessed.get(plan.seq_id, ())
            computed[plan.seq_id] += len(behind)
            told[plan.seq_id] += [result.sampled[plan.seq_id], *behind]
    assert told == truth


def test_a_guess_that_is_not_finite_spoils_its_own_sequence_alone(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    poisoned = kit.tiny_runner(config, fused=False)
    prompts = kit.make_prompts(2, VOCAB - 1, 20)
    truth = [alone(kit, poisoned, i, p, 1)[0] for i, p in enumerate(prompts)]
    poisoned.loaded.forward.model.get_input_embeddings().weight.data[VOCAB - 1] = torch.nan
    plans = [
        SequencePlan(
            i, [*p, VOCAB - 1], 0, [5 * i + n for n in range(5)], sample_plan(i, p, []), num_guesses=1
        )
        for i, p in enumerate(prompts)
    ]
    result = poisoned.run(StepPlan(0, (plans[0], SequencePlan(1, prompts[1], 0, [9, 8], plans[1].sample))))
    assert (dict(result.sampled), result.failed) == ({1: truth[1]}, {})
    assert (result.guessed, result.spoilt) == ({}, {0})


EAGER = 1e6  # tokens that a step is said to cost beside its own: every guess is worth its row
# With few tokens left to choose, answers soon repeat themselves.
FEW = {token: -100.0 for token in range(VOCAB) if token not in (3, 70, 141)}


def answers(
    runner: ModelRunner, prompts: list[list[int]], guesses: int, **params: Any
) -> tuple[dict[str, Any], Scheduler]:
    config = EngineConfig(num_blocks=200, max_model_len=400, speculative_tokens=guesses)
    scheduler = Scheduler(config, FixedBudget(512, 32, EAGER))
    engine = Engine(scheduler, runner, time.monotonic)
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=60, temperature=0.0 if i % 2 else 0.5, logprobs=1, **params)
        engine.add(Request(f"r{i}", prompt, sampling, seed=i))
    told: dict[str, Any] = {f"r{i}": [] for i in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, TokenOutput)
            told[output.request_id].append(output.scored)
    return told, scheduler


def test_engines_with_and_without_guesses_say_the_same(kit: SimpleNamespace, runner: ModelRunner) -> None:
    prompts = kit.make_prompts(5, VOCAB, 20)
    plain, _ = answers(runner, prompts, 0, logit_bias=FEW)
    guessed, scheduler = answers(runner, prompts, 5, logit_bias=FEW)
    assert guessed == plain
    stats = scheduler.stats()
    assert stats.guessed_tokens > stats.right_guesses > 10


@pytest.mark.model
def test_the_demo_model_takes_fewer_steps_and_says_the_same(demo_runner: ModelRunner) -> None:
    prompts = [[504, 44328, 356, 363, 1007, 28, 260, 2644, 425, 1889, 429, 260, 8393, 388, 28, 284, 260]] * 2
    plain, alone_scheduler = answers(demo_runner, prompts, 0)
    guessed, scheduler = answers(demo_runner, prompts, 5)
    assert guessed == plain
    assert scheduler.stats().right_guesses > 20
    assert scheduler.stats().step < alone_scheduler.stats().step
