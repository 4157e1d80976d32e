"""A neighbour never moves a request's rotary table, and short requests see the model's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.model.runner import ModelRunner

LIMIT = 32


def dynamic_llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LIMIT,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
    )


def longrope_phi3() -> Any:
    from transformers import Phi3Config

    return Phi3Config(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=LIMIT,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.7 * i for i in range(8)],
            "original_max_position_embeddings": LIMIT,
        },
    )


CONFIGS = {"dynamic": dynamic_llama, "longrope": longrope_phi3}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_long_neighbour_changes_nothing(kit: SimpleNamespace, kind: str) -> None:
    runner: ModelRunner = kit.tiny_runner(CONFIGS[kind](), num_blocks=40)
    prompts = kit.make_prompts(2, 101, 90)
    prompts[0] = prompts[1][:11]
    alone = [kit.Driver(runner).run([kit.Sequence(p)], 6)[0].scored for p in prompts]
    crowd = kit.Driver(runner).run([kit.Sequence(p) for p in prompts], 6, chunk=lambda: 13)
    assert [s.scored for s in crowd] == alone


@pytest.mark.parametrize("kind", CONFIGS)
def test_short_requests_equal_transformers(kit: SimpleNamespace, kind: str) -> None:
    loaded, plain = kit.tiny_model(CONFIGS[kind]())
    runner = ModelRunner(loaded, num_blocks=40, block_size=16)
    prompts = kit.make_prompts(2, 101, 90)
    long, short = kit.Sequence(prompts[1]), kit.Sequence(prompts[1][:20])
    kit.Driver(runner).run([long, short], 6)
    with torch.inference_mode():
        logits = plain(torch.tensor([[*short.prompt, *short.output]]), use_cache=False).logits[0]
    expected = logits.log_softmax(-1)[len(short.prompt) - 1 : -1]
    for row, scored in zip(expected, short.scored, strict=True):
        assert abs(float(row[scored.token_id]) - scored.logprob) < 2e-3


@pytest.mark.parametrize("kind", CONFIGS)
def test_growing_past_the_limit_equals_decoding_token_by_token(kit: SimpleNamespace, kind: str) -> None:
    """That is what transformers computes when it decodes with a cache from the first token on."""
    from transformers import DynamicCache

    loaded, plain = kit.tiny_model(CONFIGS[kind]())
    runner = ModelRunner(loaded, num_blocks=40, block_size=16)
    prompt = kit.make_prompts(2, 101, 90)[1][:50]
    ours = kit.Driver(runner).run([kit.Sequence(prompt)], 4, chunk=lambda: 9)[0]
    cache, rows = DynamicCache(config=plain.config), []
    with torch.inference_mode():
        for position, token in enumerate([*prompt, *ours.output]):
            out = plain(
                torch.tensor([[token]]),
                position_ids=torch.tensor([[position]]),
                cache=cache,
                use_cache=True,
            )
            rows.append(out.logits[0, -1].log_softmax(-1))
    for row, scored in zip(rows[len(prompt) - 1 : -1], ours.scored, strict=True):
        assert abs(float(row[scored.token_id]) - scored.logprob) < 2e-3
