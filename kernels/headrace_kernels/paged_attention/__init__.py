"""Causal attention of packed tokens over keys and values in blocks, read where they lie.

Caches of one layer: keys [blocks, kv_heads, k_dim, block_size], values [blocks, kv_heads, block_size, v_dim],
in fp32, fp16, bf16, or in int8 with scales of keys and of values, fp32 [blocks, kv_heads, block_size] each.
Arithmetic is in fp32. A token's result depends on its own sequence and position alone: not on the chunk it
came in, nor on its neighbours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..dispatch import Backend, backend
from ..native import structs
from . import reference

Ints = npt.NDArray[np.int64]
Scales = tuple[Tensor, Tensor]
MAX_GROUP = 256  # query heads of one KV head
KV_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}  # attention.h's KvType


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequences:
    """Which of a step's packed tokens are whose. Build with `pack_sequences`."""

    cu: Ints  # [S + 1]: sequence i owns tokens cu[i] … cu[i + 1] - 1
    starts: Ints  # [S]: position of its first token
    tables: Ints  # the block tables, one after another
    table_starts: Ints  # [S + 1]
    struct: structs.Sequences

    @classmethod
    def of(cls, cu: Ints, starts: Ints, tables: Ints, table_starts: Ints) -> PackedSequences:
        """From contiguous int64 arrays of which the caller knows that tables cover their tokens."""
        arrays = (cu, starts, tables, table_starts)
        struct = structs.Sequences(len(starts), *(a.__array_interface__["data"][0] for a in arrays))
        return cls(*arrays, struct)


def pack_sequences(cu: Ints, starts: Ints, block_tables: Sequence[Ints], block_size: int) -> PackedSequences:
    """Raises ValueError where a block table does not cover its sequence's tokens."""
    cu, starts = np.ascontiguousarray(cu, np.int64), np.ascontiguousarray(starts, np.int64)
    lengths = np.fromiter(map(len, block_tables), np.int64, len(block_tables))
    if not len(cu) - 1 == len(starts) == len(lengths):
        raise ValueError(f"{len(cu) - 1} sequences, {len(starts)} starts, {len(lengths)} block tables")
    if np.any(lengths * block_size < starts + np.diff(cu)):
        raise ValueError("a block table does not cover its sequence")
    tables = np.concatenate(block_tables).astype(np.int64) if len(lengths) else np.empty(0, np.int64)
    table_starts = np.concatenate(([0], np.cumsum(lengths)))
    return PackedSequences.of(cu, starts, tables, table_starts)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: PackedSequences,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
    on: Backend | None = None,
) -> Tensor:
    """query [tokens, heads, k_dim] fp32 → [tokens, heads, v_dim]; the step's own keys are in the blocks.

    `window` counts the keys a query sees, itself included (0: all). `sinks` [heads] are logits with no value.
    """
    shape, cache = attention_shape(query.shape[1], keys, values), kv_cache(keys, values, scales)
    if query.dtype != torch.float32 or query.shape[2] != shape.k_dim:
        raise ValueError(f"query must be fp32 [tokens, heads, {shape.k_dim}]")
    if int(sequences.cu[-1]) != query.shape[0]:
        raise ValueError(f"{query.shape[0]} tokens, but sequences of {int(sequences.cu[-1])}")
    query = query.contiguous()
    kept = None if sinks is None else sinks.to(torch.float32).contiguous()
    options = structs.AttentionOptions(scale, softcap, window, None if kept is None else kept.data_ptr())
    out = torch.empty(query.shape[0], shape.heads, shape.v_dim)
    (on or backend()).library.hr_paged_attention(
        ctypes.byref(shape),
        ctypes.byref(options),
        ctypes.byref(sequences.struct),
        query.data_ptr(),
        query.stride(0),
        ctypes.byref(cache),
        out.data_ptr(),
        out.stride(0),
    )
    return out


def attention_shape(heads: int, keys: Tensor, values: Tensor) -> structs.AttentionShape:
    """Raises ValueError where the caches of a layer do not have the layout above."""
    for name, cache in (("keys", keys), ("values", values)):
        if cache.ndim != 4 or cache.dtype not in KV_TYPES or not cache.is_contiguous():
            raise ValueError(f"{name} must be a contiguous fp32, fp16, bf16 or int8 cache of four dimensions")
    blocks, kv_heads, k_dim, block_size = keys.shape
    if values.shape[:3] != (blocks, kv_heads, block_size):
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not belong together")
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads")
    return structs.AttentionShape(heads, kv_heads, k_dim, values.shape[3], block_size)


def kv_cache(keys: Tensor, values: Tensor, scales: Scales | None = None) -> structs.KvCache:
    """A layer's caches for the compiled kernels. Raises ValueError where types or scales do not fit."""
    if keys.dtype != values.dtype or (scales is None) != (keys.dtype != torch.int8):
        raise ValueError(f"keys of {keys.dtype}, values of {values.dtype}, scales: {scales is not None}")
    wanted = (*keys.shape[:2], keys.shape[3])
    for t in scales or ():
        if t.dtype != torch.float32 or t.shape != wanted or not t.is_contiguous():
            raise ValueError(f"scales must be contiguous fp32 {list(wanted)}")
    addresses = (None if t is None else t.data_ptr() for t in scales or (None, None))
    return structs.KvCache(KV_TYPES[keys.dtype], keys.data_ptr(), values.data_ptr(), *addresses)


__all__ = ["PackedSequences", "attention_shape", "kv_cache", "pack_sequences", "paged_attention", "reference"]
