"""One process of two that share a tiny model; the last line says how far its logits are from the whole's."""

from __future__ import annotations

import datetime
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers

from worker.model.linear import replace_linears
from worker.model.packed import PackedModel
from worker.model.selftest import bits_agree, crowded_logits, disagreement, make_reference, self_test_cache
from worker.model.tensor_parallel import shard


def main(rank: int, meeting_place: str) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=2, timeout=wait
    )
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0, 0.2)
    cpu = torch.device("cpu")
    reference = make_reference(model, 64, 64, cpu)
    assert shard(model) == 2 * 7 + 1
    replace_linears(model, 1)
    packed = PackedModel(model, cpu)
    assert {(s.kv_heads, s.k_dim) for s in packed.layers} == {(1, 8)}
    kv = self_test_cache(packed, torch.float32, cpu)
    crowd = crowded_logits(packed, reference.prompts, kv)
    exact = bits_agree(packed, reference.prompts, kv, crowd, 1)
    dist.destroy_process_group()
    print(disagreement(crowd, reference), exact)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
