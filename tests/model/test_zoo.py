"""Random models of many architectures: packed and chunked, they equal transformers' own eager attention."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from headrace_kernels.dispatch import backend
from worker.model.runner import ModelRunner

BASE = dict(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
ROPE = {"rope_theta": 10_000.0}
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, head size 12, one KV head": ("LlamaConfig", {"head_dim": 12, "num_key_value_heads": 1}),
    "llama, 7 heads a KV head": (
        "LlamaConfig",
        {"hidden_size": 70, "head_dim": 20, "num_attention_heads": 7, "num_key_value_heads": 1},
    ),
    "llama, biases, tied": ("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama 3 rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                **ROPE,
            }
        },
    ),
    "llama yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                **ROPE,
            }
        },
    ),
    "llama linear rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **ROPE}}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral, window 6": ("MistralConfig", {"sliding_window": 6}),
    "mistral, window 64": ("MistralConfig", {"sliding_window": 64}),
    "gemma2": ("Gemma2Config", {"sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 24}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {"sliding_window": 9}),
    "smollm3 (layers without rotation)": ("SmolLM3Config", {"num_hidden_layers": 5}),
    "stablelm": ("StableLmConfig", {}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3, "logits_scaling": 3.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "olmo2": ("Olmo2Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 9}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "nemotron": ("NemotronConfig", {"head_dim": 16}),
    "gpt-oss (sinks)": (
        "GptOssConfig",
        {"sliding_window": 6, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek v3 (unequal heads)": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}
FUSED = {name for name in ZOO if name.split()[0].strip(",") in {"llama", "qwen2", "qwen3", "mistral"}} | {
    "gemma2",
    "gemma3",
    "granite",
    "phi3",
    "smollm3 (layers without rotation)",
}
INEXACT = {"gpt-oss (sinks)", "deepseek v3 (unequal heads)"}  # experts are multiplied outside linear layers


def config_of(name: str) -> Any:
    kind, extra = ZOO[name]
    base = {} if kind == "GPT2Config" else dict(BASE)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 101}
    return getattr(transformers, kind)(**{**base, **special, **extra})


def eager_logits(plain: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        positions = torch.arange(len(ids))[None]
        out: torch.Tensor = plain(torch.tensor([ids]), position_ids=positions, use_cache=False).logits[0]
    return out


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "packed") for name in ZOO), *((name, "fused") for name in sorted(FUSED))]
)
def test_packed_model_equals_eager(kit: SimpleNamespace, name: str, way: str) -> None:
    """Teacher-forced: the log-probabilities of our own tokens are those that transformers gives them."""
    loaded, plain = kit.tiny_model(config_of(name), fused=way == "fused")
    if backend().name == "cpu":
        assert loaded.forward.way == way
    assert loaded.exact == (name not in INEXACT)
    runner = ModelRunner(loaded, num_blocks=60, block_size=16)
    rng = random.Random(1)
    prompts = [[rng.randrange(101) for _ in range(n)] for n in (22, 1, 70, 17)]
    some = [kit.Sequence(p) for p in prompts]
    kit.Driver(runner).run(some, 5, chunk=lambda: rng.choice((1, 3, 7, 40)))
    for s in some:
        logits = eager_logits(plain, [*s.prompt, *s.output])[len(s.prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        for row, token, scored in zip(logprobs, s.output, s.scored, strict=True):
            assert abs(float(row[token]) - scored.logprob) < 2e-3
            assert float(row.max() - row[token]) < 1e-3, "not the greedy token"


def test_gpt2_linears_are_replaced_too(kit: SimpleNamespace) -> None:
    loaded, _ = kit.tiny_model(config_of("gpt2"))
    kinds = {type(m).__name__ for m in loaded.forward.model.modules()}
    assert "Conv1D" not in kinds
    assert "Linear" not in kinds


@pytest.mark.parametrize("kind", ["BloomConfig", "FalconConfig"])
def test_a_model_with_its_own_attention_is_refused(kit: SimpleNamespace, kind: str) -> None:
    from headrace.models import ModelError
    from worker.model.checkpoint import UnsupportedModel

    config = getattr(transformers, kind)(
        vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, n_head=4, n_layer=2
    )
    with pytest.raises((ModelError, UnsupportedModel)) as refused:
        kit.tiny_model(config)
    assert "\n" not in str(refused.value)
