"""Causal attention over KV blocks in Triton (triton_kernels.py), one kernel for prefill and decode.

A program holds a few tokens of one sequence with all the query heads of one KV head. Keys are read in tiles
of 64, tiles are added up within a split of 512 keys, and splits are merged in ascending order; tiles and
splits lie at fixed positions of the sequence. So a token's bits depend on its own sequence and position
alone. Splits are computed by one program in turn or by many at once, whichever fills the device: the
arithmetic is the same.

The arrangement follows the unified attention of B. Ringlein et al., "The Anatomy of a Triton Attention
Kernel" (2025), and the splits "Flash-Decoding" of T. Dao et al. (2023), there with a count of splits that
depends on the batch.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..triton_device import block_of, wanted_programs, widens
from .triton_kernels import Shape, attend, merge_splits

Ints = npt.NDArray[np.int64]
ROWS = 16  # (token, query head) pairs of a program, or the group of a KV head if that is larger
TILE = 64
SPLIT = 512


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSequences:
    """Which of a step's packed tokens are whose, as int32 tensors on the device. See `lay_out`."""

    cu: Tensor  # [S + 1]: sequence i owns tokens cu[i] … cu[i + 1] - 1
    starts: Tensor  # [S]: position of its first token
    tables: Tensor  # [S, width]: block tables, padded
    programs: Mapping[int, tuple[Tensor, Tensor]]  # by group: each program's sequence and first token
    longest: int  # most keys that a sequence has, or may have while this layout is used


def rows_of(group: int) -> int:
    """Rows of a program, for `group` query heads to a KV head."""
    return max(ROWS, block_of(group, 1))


def programs_of(cu: Ints, group: int) -> tuple[Ints, Ints]:
    """Each program's sequence and first packed token."""
    queries = rows_of(group) // group
    counts = -(-np.diff(cu) // queries)
    sequence = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    return sequence, cu[sequence] + within * queries


def pack_sequences(
    cu: Ints,
    starts: Ints,
    block_tables: Sequence[Ints],
    block_size: int,
    *,
    groups: Sequence[int],
    device: torch.device | str = "cpu",
) -> DeviceSequences:
    """One copy to the device. `groups`: the query heads to a KV head, of every layer that will ask.

    Raises ValueError where a block table does not cover its sequence's tokens.
    """
    lengths = np.fromiter(map(len, block_tables), np.int64, len(block_tables))
    if not len(cu) - 1 == len(starts) == len(lengths):
        raise ValueError(f"{len(cu) - 1} sequences, {len(starts)} starts, {len(lengths)} block tables")
    kv_lens = starts + np.diff(cu)
    if np.any(lengths * block_size < kv_lens):
        raise ValueError("a block table does not cover its sequence")
    tables = np.zeros((len(lengths), int(lengths.max(initial=1))), np.int32)
    for row, table in zip(tables, block_tables, strict=True):
        row[: len(table)] = table
    parts: list[npt.NDArray[np.integer]] = [cu, starts, tables.ravel()]
    for group in groups:
        parts += programs_of(cu, group)
    on_device = torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device)
    views = on_device.split([len(p) for p in parts])
    programs = {group: (views[3 + 2 * i], views[4 + 2 * i]) for i, group in enumerate(groups)}
    longest = int(kv_lens.max(initial=0))
    return DeviceSequences(views[0], views[1], views[2].view(tables.shape), programs, longest)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sequences: DeviceSequences,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    at_once: bool | None = None,
) -> Tensor:
    """query [tokens, heads, k_dim] → [tokens, heads, v_dim]; the step's own keys are in the blocks.

    keys [blocks, kv_heads, k_dim, block_size] and values [blocks, kv_heads, block_size, v_dim], any strides,
    of the queries' type; fp16 or bf16 beside queries in fp32; int8 or fp8 with `scales` of keys and of
    values, fp32 [blocks, block_size, kv_heads]. `window` counts the keys a query sees, itself included (0:
    all). `sinks` [heads] are logits with no value. `at_once`: whether splits are computed by a program each;
    None: if that is needed to fill the device.
    """
    _, kv_heads, k_dim, block_size = keys.shape
    tokens, heads, _ = query.shape
    if heads % kv_heads or query.shape[2] != k_dim or not query.is_contiguous():
        raise ValueError(f"query must be contiguous [tokens, a multiple of {kv_heads}, {k_dim}]")
    if values.shape[:3] != (keys.shape[0], kv_heads, block_size):
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not belong together")
    narrower = query.dtype == torch.float32 and keys.dtype in (torch.float16, torch.bfloat16)
    if (scales is None) != (keys.dtype == query.dtype or narrower):
        raise ValueError(f"queries of {query.dtype}, keys of {keys.dtype}, scales: {scales is not None}")
    group, v_dim = heads // kv_heads, values.shape[3]
    out = torch.empty(tokens, heads, v_dim, dtype=query.dtype, device=query.device)
    block_seq, block_first = sequences.programs[group]
    if not len(block_seq):
        return out
    rows = rows_of(group)
    padded = (block_of(k_dim), block_of(v_dim))
    shape = Shape(kv_heads, group, k_dim, v_dim, *padded, block_size, rows, rows // group, TILE, SPLIT)
    splits = -(-sequences.longest // SPLIT)
    if at_once is None:
        at_once = splits > 1 and len(block_seq) * kv_heads < wanted_programs(query.device)
    splits = splits if at_once else 0
    parts = query.new_empty(len(block_seq), kv_heads, splits, rows, padded[1] + 2, dtype=torch.float32)
    flat, count = parts.view(-1), parts[..., 0].numel()
    part_out, part_top, part_total = flat[2 * count :], flat[:count], flat[count : 2 * count]
    k_scales, v_scales = scales or (parts, parts)
    common = dict(SHAPE=shape, HAS_SINKS=sinks is not None, WINDOWED=window > 0, enable_fp_fusion=False)
    where = (block_seq, block_first, sequences.cu, sequences.starts)
    kept = parts if sinks is None else sinks
    attend[(len(block_seq), kv_heads, max(1, splits))](
        out, part_out, part_top, part_total, query, keys, values, k_scales, v_scales, kept, *where,
        sequences.tables, sequences.tables.shape[1], keys.stride(), values.stride(),
        scale, softcap, window, splits,
        WALK=not at_once,
        WIDEN=narrower or widens(query.dtype),
        QUANTISED=scales is not None,
        CAPPED=softcap > 0,
        **common,
    )  # fmt: skip
    if at_once:
        merge_splits[(len(block_seq), kv_heads)](
            out, part_out, part_top, part_total, kept, *where, window, splits, **common
        )  # fmt: skip
    return out
