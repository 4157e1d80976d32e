"""Whole steps through Triton's kernels, under its interpreter or on the card, beside the torch path."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from headrace.messages import SamplingParams
from worker.engine.plan import SamplePlan, ScoredToken
from worker.model.packed import PackedModel
from worker.model.sampler import Drawn, Sampler
from worker.model.selftest import disagreement, make_reference

WHY = "triton is not installed"
models: Any = pytest.importorskip("worker.model.triton_model", reason=WHY)
samplers: Any = pytest.importorskip("worker.model.triton_sampler", reason=WHY)
attentions: Any = pytest.importorskip("worker.model.triton_attention", reason=WHY)
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=12,
    pad_token_id=0,
)


def plain_model(kind: str, **extra: Any) -> Any:
    config = getattr(transformers, kind)(**{**SMALL, **extra})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" not in name:
                tensor.normal_(0, 0.2)
    return model


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("LlamaConfig", {"tie_word_embeddings": True}),
        ("Qwen2Config", {}),
        ("Qwen3Config", {}),
        ("Gemma2Config", {"sliding_window": 6}),
    ],
)
def test_steps_agree_with_transformers_and_in_a_crowd(kind: str, extra: dict[str, Any]) -> None:
    """Biases, head norms, windows, caps, tied heads; `try_triton` also compares bits alone and in a crowd."""
    model = plain_model(kind, **extra)
    reference = make_reference(model, 101, 64, CPU)
    found = models.try_triton(model, reference, DEVICE, torch.float32)
    assert found is not None
    assert found.way == "triton"


def test_a_model_that_is_no_such_decoder_is_left_as_it_was() -> None:
    model = plain_model("StableLmConfig")
    before = [p.clone() for p in model.parameters()]
    assert models.try_triton(model, make_reference(model, 101, 64, CPU), DEVICE, torch.float32) is None
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_transformers_own_layers_over_triton_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.model import attention
    from worker.model.selftest import crowded_logits, self_test_cache

    model = plain_model("LlamaConfig").to(DEVICE)
    reference = make_reference(model, 101, 64, DEVICE)
    packed = PackedModel(model, DEVICE)
    monkeypatch.setattr(attention, "begin_step", attentions.TritonAttention)
    kv = self_test_cache(packed, torch.float32, DEVICE)
    with torch.inference_mode():
        crowd = crowded_logits(packed, reference.prompts, kv)
    assert disagreement(crowd, reference) < 1e-4


def test_same_tokens_as_the_torch_sampler() -> None:
    rng = random.Random(3)
    logits = 3 * torch.randn(12, 300, generator=torch.Generator().manual_seed(2))
    plans = [
        SamplePlan(
            SamplingParams(
                temperature=rng.choice([0.0, 0.7, 1.4]),
                top_k=rng.choice([0, 1, 20]),
                top_p=rng.choice([1.0, 0.7]),
                min_p=rng.choice([0.0, 0.1]),
                presence_penalty=rng.choice([0.0, 0.5]),
            ),
            i, 0, 4, (1, 2), (3, 4), False,
        )
        for i in range(12)
    ]  # fmt: skip
    logits[5, 7] = torch.nan
    expected = Sampler(290, [2]).sample(logits, plans)
    got = samplers.TritonSampler(290, [2]).sample(logits.to(DEVICE), plans)
    assert [_outcome(row) for row in got] == [_outcome(row) for row in expected]
    assert _outcome(got[5]) == "non_finite"


def _outcome(row: Drawn) -> int | str:
    return row.token_id if isinstance(row, ScoredToken) else row.code


@pytest.mark.parametrize("kv_dtype", ["auto", "fp16", "int8"])
def test_the_runner_takes_triton_all_the_way(
    kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    """Loader, runner and sampler with the backend chosen, beside the same model without it."""
    from headrace_kernels import dispatch
    from worker.model import fused, loader
    from worker.model.runner import ModelRunner

    prompts = [[5, 9, 4], [7] * 20]
    outputs = []
    for name in ("torch", "triton"):
        chosen = dispatch.resolve(name)
        for module in (dispatch, fused, loader):
            monkeypatch.setattr(module, "backend", lambda chosen=chosen: chosen)
        loaded, _ = kit.tiny_model(transformers.LlamaConfig(**SMALL), kv_dtype=kv_dtype)
        assert loaded.forward.way == ("triton" if name == "triton" else "packed")
        some = [
            kit.Sequence(p, SamplingParams(temperature=t), seed=4)
            for p, t in zip(prompts, (0, 1), strict=True)
        ]
        runner = ModelRunner(loaded, num_blocks=8, block_size=16, warm_up=False)
        kit.Driver(runner).run(some, 3, chunk=lambda: 11)
        outputs.append([s.output for s in some])
    assert outputs[0] == outputs[1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what lies in the row without a sequence
def test_a_captured_steps_buffers_give_the_bits_of_a_plain_step() -> None:
    """Filled for three sequences of a batch of four, as a graph reads them; replayed twice on a card."""
    import numpy as np

    from worker.engine.plan import SequencePlan, StepPlan
    from worker.model.graphs import StepBuffers, is_decode
    from worker.model.inputs import build_inputs
    from worker.model.selftest import BLOCK_SIZE, self_test_cache

    model = plain_model("LlamaConfig")
    found = models.try_triton(model, make_reference(model, 101, 64, CPU), DEVICE, torch.float32)
    cache = self_test_cache(found, torch.float32, DEVICE)
    tables, lengths = [[0, 3], [4], [1]], [19, 2, 7]

    def inputs(decode: bool) -> Any:
        parts = [
            SequencePlan(i, [9] if decode else list(range(n)), n if decode else 0, table, None)
            for i, (n, table) in enumerate(zip(lengths, tables, strict=True))
        ]
        return build_inputs(StepPlan(0, tuple(parts)), BLOCK_SIZE, DEVICE)

    with torch.inference_mode():
        found.logits(inputs(False), cache, torch.tensor([0], device=DEVICE))
        rows = torch.arange(3, device=DEVICE)
        expected = found.logits(inputs(True), cache, rows)
        before = [t.clone() for t in (*cache.k, *cache.v)]
        buffers = StepBuffers(4, 3, found.groups, 48, DEVICE)
        assert is_decode(inputs(True))
        assert not is_decode(inputs(False))
        buffers.fill(inputs(True))
        assert torch.equal(found.run(buffers.step, cache)[:3], expected)
        assert all(torch.equal(a, b) for a, b in zip(before, (*cache.k, *cache.v), strict=True))
    assert np.array_equal(buffers.step.slots.cpu().numpy()[3:], [-1])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device: graphs are captured on one only")
def test_replayed_graphs_give_the_bits_of_plain_steps(kit: SimpleNamespace) -> None:
    from worker.model.graphs import GraphedModel
    from worker.model.runner import ModelRunner

    model = plain_model("LlamaConfig")
    reference = make_reference(model, 101, 64, CPU)
    loaded, _ = kit.tiny_model(transformers.LlamaConfig(**SMALL))
    found = models.try_triton(model, reference, DEVICE, torch.float32)
    loaded = replace(loaded, forward=found, device=DEVICE)
    runners = [ModelRunner(loaded, num_blocks=20, block_size=16, graphs=on) for on in (False, True)]
    assert isinstance(runners[1].forward, GraphedModel)
    outputs = []
    for runner in runners:
        some = [kit.Sequence([5, 9, 4]), kit.Sequence([7] * 20), kit.Sequence([3])]
        kit.Driver(runner).run(some, 8)
        outputs.append([s.scored for s in some])
    assert outputs[0] == outputs[1]
