"""A decoder of the Llama family as one compiled call a step. Needs no transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace_kernels.decoder_step import CompiledDecoder
from headrace_kernels.paged_attention import PackedSequences
from worker.model.inputs import StepInputs
from worker.model.kv import KVCache, LayerShape

TABLE_STEP = 1024  # positions by which the rotary tables grow
Tables = Sequence[tuple[Tensor, Tensor]]  # cosines and sines [positions, dims / 2] of each rotation


class CompiledModel:
    """Same interface as PackedModel. `tables` makes the rotary tables of a sequence's first positions."""

    way = "fused"

    def __init__(
        self, decoder: CompiledDecoder, layers: tuple[LayerShape, ...], tables: Callable[[int], Tables]
    ) -> None:
        self.decoder, self.layers, self.tables = decoder, layers, tables
        self._cache: KVCache | None = None
        self._positions = 0
        self._grow_tables(1)

    def logits(self, inputs: StepInputs, kv: KVCache, rows: Tensor) -> Tensor:
        """Write this step's keys and values; the logits [R, vocab] fp32 of the packed tokens `rows` [R]."""
        if kv is not self._cache:
            self._bind(kv)
        self._grow_tables(int(inputs.kv_lens.max()))
        sequences = PackedSequences.of(inputs.cu_seqlens, inputs.starts, inputs.tables, inputs.table_starts)
        self.decoder.library.hr_set_threads(torch.get_num_threads())
        return self.decoder.step(
            inputs.token_ids[0], inputs.positions[0], inputs.slots, sequences, rows.contiguous()
        )

    def _bind(self, kv: KVCache) -> None:
        """The same memory, block for block; inside a block, the order that the attention kernel reads."""
        keys, values, scales = [], [], []
        for number, layer in enumerate(kv.layers):
            k, v = kv.k[number], kv.v[number]
            blocks, block_size = k.shape[:2]
            keys.append(k.view(blocks, layer.kv_heads, layer.k_dim, block_size))
            values.append(v.view(blocks, layer.kv_heads, block_size, layer.v_dim))
            if pair := kv.scales(number):
                by_head = [s.view(blocks, layer.kv_heads, block_size) for s in pair]
                scales.append((by_head[0], by_head[1]))
        self.decoder.bind(keys, values, scales or None)
        self._cache = kv

    @torch.inference_mode()
    def _grow_tables(self, positions: int) -> None:
        if positions <= self._positions:
            return
        self._positions = -(-positions // TABLE_STEP) * TABLE_STEP
        self.decoder.set_tables(self.tables(self._positions))
