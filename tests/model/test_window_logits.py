"""The logits that quality is measured on: the worker's model in chunks, beside transformers."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.quality.ours import CHUNK_TOKENS, window_logits
from worker.model.runner import ModelRunner


@pytest.mark.parametrize("size", [CHUNK_TOKENS // 4, CHUNK_TOKENS + 44, 2 * CHUNK_TOKENS])
def test_a_window_in_chunks_has_the_logits_of_the_whole(kit: SimpleNamespace, size: int) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    loaded, plain = kit.tiny_model(config)
    runner = ModelRunner(loaded, num_blocks=40, block_size=16, warm_up=False)
    windows = [kit.make_prompts(2, 96, size, seed)[1] for seed in (1, 2)]
    for window, found in zip(windows, window_logits(runner, windows), strict=True):
        with torch.inference_mode():
            whole = plain(input_ids=torch.tensor([window])).logits[0]
        torch.testing.assert_close(found, whole[size // 2 : size - 1], atol=2e-3, rtol=2e-3)
