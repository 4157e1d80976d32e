"""Drawing tokens in Triton: one program a row, several passes over it, no sort.

The smallest logit that top-k and top-p keep is found digit by digit: of the distance to the largest logit,
whose bits as an integer are in the order of its value, two bits a pass, by counting or by adding up what is
nearer. The draw then walks through the row in the order of ids. Sums are in fp64 and in an order of the
row's width alone.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """How each of R rows is drawn, [R] each. Greedy: temperature 0. Off: top_k 0, top_p 1, min_p 0."""

    temperature: Tensor  # fp32
    top_k: Tensor  # int32
    top_p: Tensor  # fp64
    min_p: Tensor  # fp32
    uniform: Tensor  # fp64 in [0, 1)


@triton.jit
def _largest(row, width, BANS: tl.constexpr, BLOCK: tl.constexpr):
    """First index of the largest, its value, and how many are not finite; with BANS, -infinity is."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < width, other=float("-inf"))
        fine = x < float("inf")  # NaN is not
        if not BANS:
            fine = fine & (x > float("-inf"))
        bad += tl.where(fine, 0, tl.where(at < width, 1, 0))
        where = tl.where(x > best, at, where)
        best = tl.where(x > best, x, best)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, where, 2147483647), 0)
    return first, top, tl.sum(bad, 0)


@triton.jit
def _distance(row, at, width, top, temperature):
    """(top - logit) / temperature ≥ 0, infinity past the end; and its bits, which are in the same order."""
    x = tl.load(row + at, mask=at < width, other=float("-inf"))
    d = tl.abs((top - x) / temperature)
    return d, d.to(tl.int32, bitcast=True)


@triton.jit
def _kept(d, bits, limit, min_limit):
    """exp(-d) in fp64 of what the filters keep."""
    return tl.where((bits <= limit) & (d <= min_limit), tl.exp(-d), 0.0).to(tl.float64)


@triton.jit
def _count_limit(row, width, top, temperature, wanted, BLOCK: tl.constexpr):
    """The distance bits of the wanted-th nearest."""
    limit, step = tl.zeros([], tl.int32), tl.full([], 1 << 29, tl.int32)
    for _digit in range(16):
        n1, n2, n3 = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        for begin in range(0, width, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            _near, bits = _distance(row, at, width, top, temperature)
            n1 += (bits < limit + step).to(tl.int32)
            n2 += (bits < limit + 2 * step).to(tl.int32)
            n3 += (bits < limit + 3 * step).to(tl.int32)
        more = step > 1  # the last digit has one bit
        steps = (tl.sum(n1, 0) < wanted).to(tl.int32) + ((tl.sum(n2, 0) < wanted) & more).to(tl.int32)
        limit += (steps + ((tl.sum(n3, 0) < wanted) & more).to(tl.int32)) * step
        step = tl.maximum(step >> 2, 1)
    return limit


@triton.jit
def _weight_limit(row, width, top, temperature, kept, wanted, BLOCK: tl.constexpr):
    """The distance bits at which the weight of what `kept` keeps, nearest first, reaches `wanted`."""
    limit, step = tl.zeros([], tl.int32), tl.full([], 1 << 29, tl.int32)
    for _digit in range(16):
        w1, w2 = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
        w3 = tl.zeros([BLOCK], tl.float64)
        for begin in range(0, width, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            d, bits = _distance(row, at, width, top, temperature)
            w = _kept(d, bits, kept, float("inf"))
            w1 += tl.where(bits < limit + step, w, 0.0)
            w2 += tl.where(bits < limit + 2 * step, w, 0.0)
            w3 += tl.where(bits < limit + 3 * step, w, 0.0)
        more = step > 1  # the last digit has one bit
        steps = (tl.sum(w1, 0) < wanted).to(tl.int32) + ((tl.sum(w2, 0) < wanted) & more).to(tl.int32)
        limit += (steps + ((tl.sum(w3, 0) < wanted) & more).to(tl.int32)) * step
        step = tl.maximum(step >> 2, 1)
    return limit


@triton.jit
def _total(row, width, top, temperature, limit, min_limit, BLOCK: tl.constexpr):
    total = tl.zeros([], tl.float64)
    for begin in range(0, width, BLOCK):
        d, bits = _distance(row, begin + tl.arange(0, BLOCK), width, top, temperature)
        total += tl.sum(_kept(d, bits, limit, min_limit), 0)
    return total


@triton.jit
def _walk(row, width, top, temperature, limit, min_limit, target, BLOCK: tl.constexpr):
    """The first id at which the weight before and with it exceeds `target`; else the last of any weight."""
    chosen, last = tl.full([], -1, tl.int32), tl.zeros([], tl.int32)
    before = tl.zeros([], tl.float64)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        d, bits = _distance(row, at, width, top, temperature)
        w = _kept(d, bits, limit, min_limit)
        over = (before + tl.cumsum(w, 0) > target) & (w > 0)
        found = tl.min(tl.where(over, at, 2147483647), 0)
        chosen = tl.where((chosen < 0) & (found < 2147483647), found, chosen)
        last = tl.maximum(last, tl.max(tl.where(w > 0, at, 0), 0))
        before += tl.sum(w, 0)
    return tl.where(chosen < 0, last, chosen)


@triton.jit
def _draw(
    logits,  # [rows, ≥ width]
    stride,
    width,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    ids,  # [rows] int64
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    chosen, top, bad = _largest(row, width, True, BLOCK)
    temperature, top_k = tl.load(temperatures + number), tl.load(top_ks + number)
    top_p, min_p = tl.load(top_ps + number), tl.load(min_ps + number)
    if (bad > 0) | (top == float("-inf")):
        chosen = tl.full([], -1, tl.int32)
    elif temperature > 0:
        limit = tl.full([], 0x7F7FFFFF, tl.int32)  # the largest finite distance: what is banned has no weight
        if (top_k > 0) & (top_k < width):
            limit = tl.minimum(limit, _count_limit(row, width, top, temperature, top_k, BLOCK))
        if top_p < 1.0:
            wanted = top_p * _total(row, width, top, temperature, limit, float("inf"), BLOCK)
            limit = tl.minimum(limit, _weight_limit(row, width, top, temperature, limit, wanted, BLOCK))
        min_limit = float("inf")
        if min_p > 0:
            min_limit = -tl.log(min_p)
        total = _total(row, width, top, temperature, limit, min_limit, BLOCK)
        target = tl.load(uniforms + number) * total
        chosen = _walk(row, width, top, temperature, limit, min_limit, target, BLOCK)
    tl.store(ids + number, chosen.to(tl.int64))


@triton.jit
def _argmax(logits, stride, width, ids, maxima, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    first, top, bad = _largest(logits + number * stride, width, False, BLOCK)
    tl.store(ids + number, tl.where(bad > 0, -1, first).to(tl.int64))
    tl.store(maxima + number, tl.where(bad > 0, float("nan"), top))


@triton.jit
def _log_sum_exp(logits, stride, width, out, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    _first, top, _bad = _largest(row, width, False, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(row + at, mask=at < width, other=float("-inf")) - top)
    tl.store(out + number, top + tl.log(tl.sum(total, 0)))


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """One id a row, int64 [rows], on the device; -1 for a row with a NaN or a +infinity or all banned.

    logits fp32 [rows, width] with adjacent columns; -infinity is a banned token. Tokens equal to the last
    one that a filter keeps are kept too; top_p counts what top_k left.
    """
    _check(logits)
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if len(ids):
        _draw[(len(ids),)](
            logits,
            logits.stride(0),
            logits.shape[1],
            draws.temperature,
            draws.top_k,
            draws.top_p,
            draws.min_p,
            draws.uniform,
            ids,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return ids


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [rows, width] fp32 → (first id of the largest, int64 [rows]; its value [rows]).

    A row with a NaN or an infinity gets -1 and NaN.
    """
    _check(logits)
    rows, width = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    maxima = torch.empty(rows, device=logits.device)
    if rows:
        _argmax[(rows,)](logits, logits.stride(0), width, ids, maxima, BLOCK=BLOCK)
    return ids, maxima


def log_sum_exp(logits: Tensor) -> Tensor:
    """logits [rows, width] fp32 → [rows]: a token's log-probability is its logit less this."""
    _check(logits)
    out = torch.empty(logits.shape[0], device=logits.device)
    if len(out):
        _log_sum_exp[(len(out),)](logits, logits.stride(0), logits.shape[1], out, BLOCK=BLOCK)
    return out


def _check(logits: Tensor) -> None:
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError("logits must be fp32 [rows, width] with adjacent columns")
