"""Attention of one step through Triton, for a model whose layers are transformers' own."""

from __future__ import annotations

from torch import Tensor

from headrace_kernels.paged_attention.triton import DeviceSequences, pack_sequences, paged_attention
from worker.model.inputs import StepInputs
from worker.model.kv import KVCache
from worker.model.tiles import AttentionCall


def device_sequences(inputs: StepInputs, groups: tuple[int, ...], kv: KVCache) -> DeviceSequences:
    return pack_sequences(
        inputs.cu_seqlens,
        inputs.starts,
        inputs.block_tables,
        inputs.block_size,
        groups=groups,
        device=kv.k[0].device,
    )


def kernel_caches(kv: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys [blocks, heads, dim, block_size] and values [blocks, heads, block_size, dim], without a copy."""
    return kv.k[layer].permute(0, 2, 3, 1), kv.v[layer].permute(0, 2, 1, 3)


class TritonAttention:
    """The step's sequences are laid out once for each number of query heads that share a KV head."""

    def __init__(self, kv: KVCache, inputs: StepInputs) -> None:
        self.kv, self.inputs = kv, inputs
        self._sequences: dict[int, DeviceSequences] = {}

    def attend(self, layer: int, query: Tensor, call: AttentionCall) -> Tensor:
        """query [T, heads, k_dim] → [T, heads, v_dim]; this step's keys and values are already written."""
        group = query.shape[1] // self.kv.layers[layer].kv_heads
        if group not in self._sequences:
            self._sequences[group] = device_sequences(self.inputs, (group,), self.kv)
        return paged_attention(
            query.contiguous(),
            *kernel_caches(self.kv, layer),
            self._sequences[group],
            scale=call.scale,
            window=call.window or 0,
            softcap=call.softcap or 0.0,
            sinks=call.sinks,
            scales=self.kv.scales(layer),
        )
