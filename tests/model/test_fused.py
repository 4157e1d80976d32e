"""The compiled step found by structure: transformers' tokens, weights as the file has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from headrace_kernels.dispatch import backend
from worker.model.packed import PackedModel
from worker.model.runner import ModelRunner
from worker.model.stored import Forms, Matrix, WeightSource, in_form, narrowed, stack
from worker.model.structure import NotFusable, find_structure

pytestmark = pytest.mark.skipif(backend().name != "cpu", reason="no compiled kernels")
SMALL: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)


def plain_model(kind: str, **extra: Any) -> Any:
    config = getattr(transformers, kind)(**{**SMALL, **extra})
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def structure_of(model: Any) -> Any:
    return find_structure(PackedModel(model, torch.device("cpu")), 101)


def test_fused_and_unfused_choose_the_same_tokens(kit: SimpleNamespace) -> None:
    config = transformers.LlamaConfig(**SMALL)
    prompts = kit.make_prompts(8, 101, 60)
    outputs = []
    for fused in (True, False):
        loaded, _ = kit.tiny_model(config, fused=fused)
        assert loaded.forward.way == ("fused" if fused else "packed")
        some = [kit.Sequence(p) for p in prompts]
        kit.Driver(ModelRunner(loaded, num_blocks=80, block_size=16)).run(some, 12, chunk=lambda: 9)
        outputs.append([s.output for s in some])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_two_bytes_stay_two_bytes(kit: SimpleNamespace, dtype: torch.dtype) -> None:
    weight = torch.randn(5, 32).to(dtype).float()
    assert narrowed(weight).data.dtype == dtype
    assert torch.equal(narrowed(weight).inflated(), weight)
    weight[4, 31] += 1e-7 if dtype == torch.bfloat16 else 1e-6
    weight[4, 31] *= 1 + 2**-20
    assert narrowed(weight).data.dtype == torch.float32
    mixed = stack([narrowed(weight), narrowed(weight[:4])])
    assert torch.equal(mixed.inflated(), torch.cat([weight, weight[:4]]))


def test_structure_names_what_each_family_has() -> None:
    gemma = structure_of(plain_model("Gemma2Config", head_dim=16, sliding_window=6))
    assert gemma.activation == "gelu_tanh"
    assert gemma.embedding_scale == pytest.approx(8.0)
    assert (gemma.logit_softcap, gemma.layers[0].call.softcap) == (30.0, 50.0)
    assert [layer.call.window for layer in gemma.layers] == [6, None]
    assert gemma.layers[0].attention_post_norm is not None
    qwen = structure_of(plain_model("Qwen3Config", head_dim=32)).layers[0]
    assert qwen.q_norm is not None
    assert qwen.rotation is not None
    smol = structure_of(plain_model("SmolLM3Config", num_hidden_layers=4)).layers
    assert [layer.rotation is not None for layer in smol] == [True, True, True, False]
    assert structure_of(plain_model("GlmConfig", head_dim=16)).layers[0].rotation.interleaved


@pytest.mark.parametrize(
    ("kind", "extra", "reason"),
    [
        ("StableLmConfig", {}, "no RMS norm"),
        ("Exaone4Config", {}, "unknown purpose"),
        ("HunYuanDenseV1Config", {"head_dim": 16}, "no rotation of its projections"),
        ("ArceeConfig", {}, "gate_proj"),
        ("MixtralConfig", {"num_local_experts": 2}, "no gated MLP"),
    ],
)
def test_other_decoders_are_left_alone(kind: str, extra: dict[str, Any], reason: str) -> None:
    model = plain_model(kind, **extra)
    with pytest.raises(NotFusable, match=reason):
        structure_of(model)


def test_the_switch_keeps_transformers_layers(kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace_kernels.dispatch import resolve
    from worker.model import fused

    monkeypatch.setattr(fused, "backend", lambda: resolve("torch"))
    loaded, _ = kit.tiny_model(transformers.LlamaConfig(**SMALL))
    assert loaded.forward.way == "packed"


def test_watching_leaves_no_trace() -> None:
    model = plain_model("LlamaConfig")
    packed = PackedModel(model, torch.device("cpu"))
    find_structure(packed, 101)
    assert "attend" not in packed.context.__dict__
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.model
def test_demo_model_keeps_its_blocks(demo: Any, demo_model: Any) -> None:
    decoder = demo.forward.decoder
    assert decoder.embedding is decoder.head
    assert decoder.embedding.storage == "q8_0"
    assert {w.storage for layer in decoder.layers for w in (layer.qkv, layer.gate_up, layer.down)} == {"q4_1"}
    matrices = [w for layer in decoder.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    stored = sum(w.nbytes for w in matrices)
    assert stored + decoder.embedding.nbytes < 1.02 * demo_model.stat().st_size


def test_without_a_file_there_are_no_blocks() -> None:
    model = plain_model("LlamaConfig")
    matrix = WeightSource(model, None, Forms()).matrix(model.model.layers[0].self_attn.q_proj, 4)
    assert matrix.storage == "dense"


@pytest.mark.parametrize(
    ("forms", "storage"),
    [
        (Forms("bf16"), "dense"),
        (Forms("q8"), "q8_0"),
        (Forms("q4"), "q4_0"),
        (Forms(activations="int8"), "q8_0"),
        (Forms("q4", "int8"), "q4_0"),
    ],
)
def test_forms_asked_for(forms: Forms, storage: str) -> None:
    weight = torch.randn(6, 64)
    matrix = in_form(Matrix(weight, "dense"), forms)
    assert matrix.storage == storage
    assert matrix.int8_activations == (forms.activations == "int8")
    assert float((matrix.inflated() - weight).norm() / weight.norm()) < 0.12
    odd = in_form(Matrix(torch.randn(6, 20), "dense"), forms)
    assert odd.storage == "dense"
    assert not odd.int8_activations


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="weights 'q3'"):
        Forms("q3")
    with pytest.raises(ValueError, match="activations 'int4'"):
        Forms(activations="int4")


@pytest.mark.parametrize("forms", [Forms("q8"), Forms(activations="int8"), Forms("q4", "int8")])
def test_lossy_forms_are_exact_in_a_crowd(kit: SimpleNamespace, forms: Forms) -> None:
    """They give other numbers than fp32, but always the same ones."""
    from pathlib import Path

    from worker.model.loader import prepare

    loaded = prepare(
        plain_model("LlamaConfig"), name="t", folder=Path("x"), device=torch.device("cpu"), forms=forms
    )
    runner = ModelRunner(loaded, num_blocks=80, block_size=16)
    prompts = kit.make_prompts(6, 101, 40)
    alone = [kit.Driver(runner, seed=i).run([kit.Sequence(p)], 6)[0] for i, p in enumerate(prompts)]
    crowd = kit.Driver(runner).run([kit.Sequence(p) for p in prompts], 6, chunk=lambda: 5)
    assert [s.scored for s in crowd] == [s.scored for s in alone]


def test_lossy_forms_need_the_kernels() -> None:
    from pathlib import Path

    from headrace.models import ModelError
    from worker.model.loader import prepare

    with pytest.raises(ModelError, match="needs the compiled kernels"):
        prepare(
            plain_model("StableLmConfig"),
            name="t",
            folder=Path("x"),
            device=torch.device("cpu"),
            forms=Forms("q8"),
        )
