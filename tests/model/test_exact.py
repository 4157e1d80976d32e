"""A request's tokens and log-probabilities have the same bits alone, in any crowd and in any chunks."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.messages import SamplingParams
from worker.model.kv import KV_DTYPES
from worker.model.runner import ModelRunner

CROWDS = (1, 2, 3, 5, 8, 16, 33)


WAYS = ("fused", "packed", "fused fp16", "fused bf16", "fused int8", "packed int8")


@pytest.fixture(scope="module", params=WAYS)
def tiny_llama(kit: SimpleNamespace, request: pytest.FixtureRequest) -> ModelRunner:
    runner: ModelRunner = kit.tiny_llama(request.param, num_blocks=400)
    kv_dtype = request.param.partition(" ")[2]
    assert runner.loaded.exact
    assert runner.loaded.kv_dtype == runner.kv.k[0].dtype == KV_DTYPES[kv_dtype or "fp32"]
    return runner


def embedding_of(runner: ModelRunner, token: int) -> torch.Tensor:
    """The memory that holds a token's embedding."""
    forward = runner.loaded.forward
    if forward.way == "packed":
        row: torch.Tensor = forward.model.get_input_embeddings().weight.data[token]
        return row
    weight = forward.decoder.embedding
    assert weight.storage == "f32"
    panels: torch.Tensor = weight.panels.view(torch.float32).view(-1, weight.k, 32)
    return panels[token // 32, :, token % 32]


def outcome(sequences: list[Any]) -> list[Any]:
    return [s.scored for s in sequences]  # ids and log-probabilities, compared as floats, bit for bit


def params_of(i: int) -> SamplingParams:
    """Greedy and sampled, with every filter and penalty somewhere."""
    return (
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.9, logprobs=0),
        SamplingParams(temperature=0.7, top_p=0.8, logprobs=1),
        SamplingParams(temperature=1.2, top_k=20, min_p=0.02, logprobs=1),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, logprobs=1),
        SamplingParams(temperature=0.8, frequency_penalty=0.5, logit_bias={5: 4.0, 7: -100.0}, logprobs=1),
    )[i % 6]


def sequences(kit: SimpleNamespace, prompts: list[list[int]]) -> list[Any]:
    return [kit.Sequence(p, params_of(i), seed=1000 + i, choice=i % 3) for i, p in enumerate(prompts)]


def solo(kit: SimpleNamespace, runner: ModelRunner, prompts: list[list[int]], n: int) -> list[Any]:
    out = []
    for s in sequences(kit, prompts):
        out += outcome(kit.Driver(runner, seed=len(s.prompt)).run([s], n))
    return out


def test_crowd_equals_solo_on_a_tiny_model(kit: SimpleNamespace, tiny_llama: ModelRunner) -> None:
    prompts = kit.make_prompts(33, 211, 100)
    alone = solo(kit, tiny_llama, prompts, 5)
    for threads, sizes in ((1, CROWDS), (2, CROWDS[1::2])):
        torch.set_num_threads(threads)
        rng = random.Random(threads)
        for size in sizes:
            some = sequences(kit, prompts)[:size]
            crowd = kit.Driver(tiny_llama, seed=size).run(some, 5, chunk=partial(rng.randint, 1, 70))
            assert outcome(crowd) == alone[:size], (threads, size)


def test_every_chunk_size_equals_whole_prefill(kit: SimpleNamespace, tiny_llama: ModelRunner) -> None:
    prompt = kit.make_prompts(2, 211, 75)[1]
    whole = kit.Driver(tiny_llama).run([kit.Sequence(prompt)], 2)
    for size in range(1, 65):
        chunked = kit.Driver(tiny_llama, seed=size).run([kit.Sequence(prompt)], 2, chunk=lambda n=size: n)
        assert outcome(chunked) == outcome(whole), f"chunks of {size}"


@pytest.mark.parametrize("block_size", [1, 8, 16, 64, 48])
def test_block_size_does_not_matter(kit: SimpleNamespace, tiny_llama: ModelRunner, block_size: int) -> None:
    prompts = kit.make_prompts(6, 211, 150)
    runner = ModelRunner(tiny_llama.loaded, num_blocks=-(-3000 // block_size), block_size=block_size)
    blocks = kit.Driver(runner, seed=2).run([kit.Sequence(p) for p in prompts], 5, chunk=lambda: 23)
    plain = kit.Driver(tiny_llama).run([kit.Sequence(p) for p in prompts], 5)
    assert outcome(blocks) == outcome(plain)


@pytest.mark.parametrize("cached", [16, 32, 48, 112])
def test_resume_on_the_blocks_of_another(kit: SimpleNamespace, tiny_llama: ModelRunner, cached: int) -> None:
    """A prefix hit: the first blocks were written by another request, the rest is computed."""
    prompt = kit.make_prompts(2, 211, 150)[1][:120]
    first = kit.Driver(tiny_llama, seed=1).run([kit.Sequence(prompt)], 6)[0]
    shared = first.table[: cached // 16]
    own = [b for b in range(300, 399) if b not in first.table][: len(first.table)]
    second = kit.Sequence(prompt, computed=cached, table=[*shared, *own])
    kit.Driver(tiny_llama).run([second], 6, chunk=lambda: 7)
    assert second.scored == first.scored


def test_a_copied_block_serves_a_fork(kit: SimpleNamespace, tiny_llama: ModelRunner) -> None:
    """Copy on write: both forks go on from a partly filled block, one of them in a copy made by the plan."""
    from worker.engine.plan import StepPlan

    prompt = kit.make_prompts(2, 211, 150)[1][:21]
    params = SamplingParams(temperature=1.0, logprobs=1)
    alone = [kit.Driver(tiny_llama).run([kit.Sequence(prompt, params, 9, c)], 8)[0] for c in (0, 1)]
    head = kit.Sequence(prompt, params, 9, 0, table=[3, 4])
    kit.Driver(tiny_llama).run([head], 1)
    forks = [
        kit.Sequence(prompt, params, 9, 0, table=[3, 4, 10], computed=20),
        kit.Sequence(prompt, params, 9, 1, table=[3, 7, 11], computed=20),
    ]
    tiny_llama.run(StepPlan(0, (), ((4, 7),)))
    kit.Driver(tiny_llama).run(forks, 8)
    assert [f.scored for f in forks] == [a.scored for a in alone]


def test_poisoned_neighbour_and_stale_blocks_do_no_harm(
    kit: SimpleNamespace, tiny_llama: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that yields NaN fails alone, and its blocks can be used again by others."""
    from worker.engine.plan import StepPlan

    prompts = kit.make_prompts(3, 210, 40)
    alone = solo(kit, tiny_llama, prompts, 3)
    row = embedding_of(tiny_llama, 210)
    before = row.clone()
    row[:] = torch.nan
    try:
        some = sequences(kit, prompts)
        bad = kit.Sequence([210, 3, 4], table=[390])
        for i, s in enumerate(some):
            s.table = list(range(i * 5, i * 5 + 5))
        plans = [s.plan(i, 1000) for i, s in enumerate(some)] + [bad.plan(9, 1000)]
        result = tiny_llama.run(StepPlan(0, tuple(plans)))
        assert {i: e.code for i, e in result.failed.items()} == {9: "non_finite"}
        assert [result.sampled[i] for i in range(3)] == [a[0] for a in alone]
    finally:
        row[:] = before
    again = sequences(kit, prompts)[1]
    again.table = [390, 391, 392]  # longer and shorter than what was poisoned
    assert outcome(kit.Driver(tiny_llama).run([again], 3)) == alone[1:2]


@pytest.mark.model
def test_crowd_equals_solo_on_the_demo_model(kit: SimpleNamespace, demo_runner: ModelRunner) -> None:
    assert demo_runner.loaded.exact
    prompts = kit.make_prompts(9, 49_000, 40)
    alone = solo(kit, demo_runner, prompts, 3)
    rng = random.Random(5)
    for size, threads in ((3, 1), (9, 2)):
        torch.set_num_threads(threads)
        some = sequences(kit, prompts)[:size]
        crowd = kit.Driver(demo_runner, seed=size).run(some, 3, chunk=lambda: rng.randint(1, 64))
        assert outcome(crowd) == alone[:size]


@pytest.mark.model
@pytest.mark.parametrize("size", [1, 7, 17, 64])
def test_chunks_equal_whole_on_the_demo_model(
    kit: SimpleNamespace, demo_runner: ModelRunner, size: int
) -> None:
    prompt = kit.make_prompts(1, 49_000, 70, seed=3)[0] + list(range(100, 168))
    whole = kit.Driver(demo_runner).run([kit.Sequence(prompt)], 2)
    chunked = kit.Driver(demo_runner, seed=size).run([kit.Sequence(prompt)], 2, chunk=lambda: size)
    assert outcome(chunked) == outcome(whole)
