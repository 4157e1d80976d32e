"""Causal attention over KV blocks in Triton, one kernel for prefill and decode.

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
import triton
import triton.language as tl
from torch import Tensor

from ..triton_device import block_of, wanted_programs, widens

Ints = npt.NDArray[np.int64]
ROWS = 16  # (token, query head) pairs of a program, or the group of a KV head if that is larger
TILE = 64
SPLIT = 512


@triton.jit
def _merge(top, total, out, top2, total2, out2):
    """Two parts of a softmax, each as its maximum, its sum and its weighted values under that maximum."""
    both = tl.maximum(top, top2)
    safe = tl.where(both == float("-inf"), 0.0, both)
    a, b = tl.exp(top - safe), tl.exp(top2 - safe)
    return both, total * a + total2 * b, out * a[:, None] + out2 * b[:, None]


@triton.jit
def _tanh(x):
    small = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -y, y)


@triton.jit
def _split(
    split,
    q,  # [ROWS, K_BLOCK]
    position,  # [ROWS]
    low,
    kv_len,
    kv_head,
    table,  # block table of the sequence
    keys,
    values,
    k_scales,
    v_scales,
    k_strides,
    v_strides,
    scale,
    softcap,
    window,
    SHAPE: tl.constexpr,
    WIDEN: tl.constexpr,
    QUANTISED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Maximum, sum and weighted values [ROWS, V_BLOCK] over the keys of one split that rows may see."""
    KV_HEADS: tl.constexpr = SHAPE[0]
    K_DIM: tl.constexpr = SHAPE[2]
    V_DIM: tl.constexpr = SHAPE[3]
    K_BLOCK: tl.constexpr = SHAPE[4]
    V_BLOCK: tl.constexpr = SHAPE[5]
    BLOCK_SIZE: tl.constexpr = SHAPE[6]
    ROWS: tl.constexpr = SHAPE[7]
    TILE: tl.constexpr = SHAPE[9]
    SPLIT: tl.constexpr = SHAPE[10]
    k_dim, v_dim = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, V_BLOCK], tl.float32)
    first = tl.maximum(split * SPLIT, low // TILE * TILE)
    for at in range(first, tl.minimum(split * SPLIT + SPLIT, kv_len), TILE):
        key = at + tl.arange(0, TILE)
        written = key < kv_len
        block = tl.load(table + key // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        k_base = block * k_strides[0] + kv_head * k_strides[1] + slot * k_strides[3]
        k = tl.load(
            keys + k_base[None, :] + k_dim[:, None] * k_strides[2],
            mask=(k_dim < K_DIM)[:, None] & written[None, :],
            other=0.0,
        )
        v_base = block * v_strides[0] + kv_head * v_strides[1] + slot * v_strides[2]
        v = tl.load(
            values + v_base[:, None] + v_dim[None, :] * v_strides[3],
            mask=written[:, None] & (v_dim < V_DIM)[None, :],
            other=0.0,
        )
        if QUANTISED or WIDEN:
            k, v = k.to(q.dtype), v.to(q.dtype)
        s = tl.dot(q, k, input_precision="ieee") * scale
        if QUANTISED:
            at_scale = (block * BLOCK_SIZE + slot) * KV_HEADS + kv_head
            s *= tl.load(k_scales + at_scale, mask=written, other=0.0)[None, :]
        if CAPPED:
            s = _tanh(s / softcap) * softcap
        behind = position[:, None] - key[None, :]
        seen = behind >= 0
        if WINDOWED:
            seen = seen & (behind < window)
        s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.where(seen, tl.exp(s - safe[:, None]), 0.0)
        old = tl.exp(top - safe)
        total = total * old + tl.sum(p, 1)
        if QUANTISED:
            p *= tl.load(v_scales + at_scale, mask=written, other=0.0)[None, :]
        out = out * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top
    return top, total, out


@triton.jit
def _rows(
    program, kv_head, block_seq, block_first, cu, starts, window, WINDOWED: tl.constexpr, SHAPE: tl.constexpr
):
    """Which tokens and heads a program's rows are, and which keys they may see: low … kv_len - 1."""
    GROUP: tl.constexpr = SHAPE[1]
    ROWS: tl.constexpr = SHAPE[7]
    QUERIES: tl.constexpr = SHAPE[8]
    sequence = tl.load(block_seq + program)
    known = tl.maximum(sequence, 0)
    first = tl.load(block_first + program)
    begin, end, start = tl.load(cu + known), tl.load(cu + known + 1), tl.load(starts + known)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = (row < QUERIES * GROUP) & (token < end)
    position = start + token - begin
    kv_len = start + tl.minimum(first + QUERIES, end) - begin
    low = tl.zeros_like(kv_len)
    if WINDOWED:
        low = tl.maximum(start + first - begin - window + 1, 0)
    return sequence, token.to(tl.int64), head, live, position, low, kv_len


@triton.jit
def _start(sinks, head, live, HAS_SINKS: tl.constexpr, SHAPE: tl.constexpr):
    """The softmax before any key: nothing, or the sink."""
    V_BLOCK: tl.constexpr = SHAPE[5]
    ROWS: tl.constexpr = SHAPE[7]
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    return top, total, tl.zeros([ROWS, V_BLOCK], tl.float32)


@triton.jit
def _finish(out, total, result, token, head, live, SHAPE: tl.constexpr):
    HEADS: tl.constexpr = SHAPE[0] * SHAPE[1]
    V_DIM: tl.constexpr = SHAPE[3]
    V_BLOCK: tl.constexpr = SHAPE[5]
    v_dim = tl.arange(0, V_BLOCK)
    y = result / tl.where(live, total, 1.0)[:, None]
    places = (token * HEADS + head)[:, None] * V_DIM + v_dim[None, :]
    tl.store(out + places, y.to(out.dtype.element_ty), mask=live[:, None] & (v_dim < V_DIM)[None, :])


@triton.jit
def _attention(
    out,  # [tokens, heads, v_dim]
    part_out,  # [programs, kv_heads, splits, ROWS, V_BLOCK] fp32
    part_top,  # [programs, kv_heads, splits, ROWS] fp32
    part_total,
    query,  # [tokens, heads, k_dim]
    keys,  # [blocks, kv_heads, k_dim, block_size] by strides
    values,  # [blocks, kv_heads, block_size, v_dim] by strides
    k_scales,  # [blocks, block_size, kv_heads] fp32
    v_scales,
    sinks,  # [heads]
    block_seq,  # [programs]: the sequence, -1 for none
    block_first,  # [programs]: its first token, packed
    cu,  # [sequences + 1]
    starts,  # [sequences]
    tables,  # [sequences, table_width]
    table_width,
    k_strides,
    v_strides,
    scale,
    softcap,
    window,
    splits,
    SHAPE: tl.constexpr,
    WALK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
    QUANTISED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    KV_HEADS: tl.constexpr = SHAPE[0]
    GROUP: tl.constexpr = SHAPE[1]
    K_DIM: tl.constexpr = SHAPE[2]
    K_BLOCK: tl.constexpr = SHAPE[4]
    V_BLOCK: tl.constexpr = SHAPE[5]
    ROWS: tl.constexpr = SHAPE[7]
    SPLIT: tl.constexpr = SHAPE[10]
    program, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, token, head, live, position, low, kv_len = _rows(
        program, kv_head, block_seq, block_first, cu, starts, window, WINDOWED, SHAPE
    )
    if sequence < 0:
        return
    k_dim = tl.arange(0, K_BLOCK)
    q = tl.load(
        query + ((token * KV_HEADS * GROUP + head) * K_DIM)[:, None] + k_dim[None, :],
        mask=live[:, None] & (k_dim < K_DIM)[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    table = tables + sequence.to(tl.int64) * table_width
    if WALK:
        top, total, result = _start(sinks, head, live, HAS_SINKS, SHAPE)
        for split in range(low // SPLIT, tl.cdiv(kv_len, SPLIT)):
            top2, total2, result2 = _split(
                split, q, position, low, kv_len, kv_head, table, keys, values, k_scales, v_scales,
                k_strides, v_strides, scale, softcap, window, SHAPE, WIDEN, QUANTISED, CAPPED, WINDOWED,
            )  # fmt: skip
            top, total, result = _merge(top, total, result, top2, total2, result2)
        _finish(out, total, result, token, head, live, SHAPE)
    else:
        split = tl.program_id(2)
        if (split < low // SPLIT) | (split >= tl.cdiv(kv_len, SPLIT)):
            return
        top, total, result = _split(
            split, q, position, low, kv_len, kv_head, table, keys, values, k_scales, v_scales,
            k_strides, v_strides, scale, softcap, window, SHAPE, WIDEN, QUANTISED, CAPPED, WINDOWED,
        )  # fmt: skip
        row = ((program.to(tl.int64) * KV_HEADS + kv_head) * splits + split) * ROWS + tl.arange(0, ROWS)
        tl.store(part_top + row, top)
        tl.store(part_total + row, total)
        tl.store(part_out + row[:, None] * V_BLOCK + tl.arange(0, V_BLOCK)[None, :], result)


@triton.jit
def _merge_splits(
    out,
    part_out,
    part_top,
    part_total,
    sinks,
    block_seq,
    block_first,
    cu,
    starts,
    window,
    splits,
    SHAPE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    KV_HEADS: tl.constexpr = SHAPE[0]
    V_BLOCK: tl.constexpr = SHAPE[5]
    ROWS: tl.constexpr = SHAPE[7]
    SPLIT: tl.constexpr = SHAPE[10]
    program, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, token, head, live, _, low, kv_len = _rows(
        program, kv_head, block_seq, block_first, cu, starts, window, WINDOWED, SHAPE
    )
    if sequence < 0:
        return
    top, total, result = _start(sinks, head, live, HAS_SINKS, SHAPE)
    for split in range(low // SPLIT, tl.cdiv(kv_len, SPLIT)):
        row = ((program.to(tl.int64) * KV_HEADS + kv_head) * splits + split) * ROWS + tl.arange(0, ROWS)
        result2 = tl.load(part_out + row[:, None] * V_BLOCK + tl.arange(0, V_BLOCK)[None, :])
        top, total, result = _merge(
            top, total, result, tl.load(part_top + row), tl.load(part_total + row), result2
        )
    _finish(out, total, result, token, head, live, SHAPE)


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

    keys [blocks, kv_heads, k_dim, block_size] and values [blocks, kv_heads, block_size, v_dim], any strides;
    int8 or fp8 with `scales` of keys and of values, fp32 [blocks, block_size, kv_heads]. `window` counts the
    keys a query sees, itself included (0: all). `sinks` [heads] are logits with no value. `at_once`: whether
    splits are computed by a program each; None: if that is needed to fill the device.
    """
    _, kv_heads, k_dim, block_size = keys.shape
    tokens, heads, _ = query.shape
    if heads % kv_heads or query.shape[2] != k_dim or not query.is_contiguous():
        raise ValueError(f"query must be contiguous [tokens, a multiple of {kv_heads}, {k_dim}]")
    if values.shape[:3] != (keys.shape[0], kv_heads, block_size):
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not belong together")
    if (scales is None) != (keys.dtype == query.dtype):
        raise ValueError(f"queries of {query.dtype}, keys of {keys.dtype}, scales: {scales is not None}")
    group, v_dim = heads // kv_heads, values.shape[3]
    out = torch.empty(tokens, heads, v_dim, dtype=query.dtype, device=query.device)
    block_seq, block_first = sequences.programs[group]
    if not len(block_seq):
        return out
    rows = rows_of(group)
    padded = (block_of(k_dim), block_of(v_dim))
    shape = (kv_heads, group, k_dim, v_dim, *padded, block_size, rows, rows // group, TILE, SPLIT)
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
    _attention[(len(block_seq), kv_heads, max(1, splits))](
        out, part_out, part_top, part_total, query, keys, values, k_scales, v_scales, kept, *where,
        sequences.tables, sequences.tables.shape[1], keys.stride(), values.stride(),
        scale, softcap, window, splits,
        WALK=not at_once,
        WIDEN=widens(query.dtype),
        QUANTISED=scales is not None,
        CAPPED=softcap > 0,
        **common,
    )  # fmt: skip
    if at_once:
        _merge_splits[(len(block_seq), kv_heads)](
            out, part_out, part_top, part_total, kept, *where, window, splits, **common
        )  # fmt: skip
    return out
