"""Triton's attention over blocks, on the card or under the interpreter: right, whatever the company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_kernels.paged_attention import reference

ops: Any = pytest.importorskip("headrace_kernels.paged_attention.triton", reason="triton is not installed")
rotary: Any = pytest.importorskip("headrace_kernels.rotary_kv.triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The interpreter loses a carry into the exponent when it rounds to fp8: one in many comes out as its half.
FP8_ERROR = 0.07 if DEVICE == "cuda" else 0.51


class Pool:
    """Caches of one layer [blocks, block_size, heads, dim] and scattered block tables of some sequences."""

    def __init__(
        self,
        draw: torch.Generator,
        lengths: list[int],
        *,
        kv_heads: int = 2,
        k_dim: int = 16,
        v_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        counts = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(counts), generator=draw).numpy()
        self.tables = np.split(order, np.cumsum(counts)[:-1])
        k = torch.randn(sum(counts), block_size, kv_heads, k_dim, generator=draw).to(dtype)
        v = torch.randn(sum(counts), block_size, kv_heads, v_dim, generator=draw).to(dtype)
        self.keys, self.values = k.to(DEVICE).permute(0, 2, 3, 1), v.to(DEVICE).permute(0, 2, 1, 3)
        self.lengths, self.block_size, self.kv_heads = lengths, block_size, kv_heads

    def part(
        self, query: Tensor, which: list[int], starts: list[int], counts: list[int], **options: Any
    ) -> Tensor:
        """query [sum of counts, heads, k_dim]: tokens of the sequences `which` from `starts` on."""
        sequences = ops.pack_sequences(
            np.concatenate(([0], np.cumsum(counts))),
            np.array(starts),
            [self.tables[i] for i in which],
            self.block_size,
            groups=[query.shape[1] // self.kv_heads],
            device=DEVICE,
        )
        out: Tensor = ops.paged_attention(
            query.to(DEVICE), self.keys, self.values, sequences, **{"scale": 0.3, **options}
        )
        return out.cpu()

    def run(self, query: Tensor, counts: list[int], **options: Any) -> Tensor:
        starts = [n - c for n, c in zip(self.lengths, counts, strict=True)]
        return self.part(query, list(range(len(counts))), starts, counts, **options)

    def expect(self, query: Tensor, counts: list[int], **options: Any) -> Tensor:
        keys, values = self.keys.cpu().double(), self.values.cpu().double()
        out = []
        for q, n, count, table in zip(query.split(counts), self.lengths, counts, self.tables, strict=True):
            k, v = reference.gather(keys, values, table.tolist(), n)
            out.append(reference.attend(q.double(), k, v, n - count, **{"scale": 0.3, **options}))
        return torch.cat(out)


def agree(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    assert torch.allclose(got.double(), expected, rtol=tolerance, atol=tolerance), (
        (got - expected).abs().max()
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("dims", "group"), [((12, 12), 3), ((20, 36), 7), ((64, 64), 1), ((24, 16), 17)])
def test_heads_of_any_size(
    draw: torch.Generator, dims: tuple[int, int], group: int, dtype: torch.dtype
) -> None:
    pool = Pool(draw, [70, 5, 33], k_dim=dims[0], v_dim=dims[1], dtype=dtype)
    query = torch.randn(23, 2 * group, dims[0], generator=draw).to(dtype)
    agree(pool.run(query, [1, 5, 17]), pool.expect(query, [1, 5, 17]))


@pytest.mark.parametrize("block_size", [1, 5, 16, 48, 128])
def test_blocks_of_any_size(draw: torch.Generator, block_size: int) -> None:
    pool = Pool(draw, [131, 64, 1], block_size=block_size)
    query = torch.randn(12, 6, 16, generator=draw)
    agree(pool.run(query, [10, 1, 1]), pool.expect(query, [10, 1, 1]))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"window": 40}, {"window": 600}, {"softcap": 5.0}, {"window": 66, "softcap": 20.0}],
)
def test_windows_and_caps(draw: torch.Generator, options: dict[str, Any], at_once: bool) -> None:
    pool = Pool(draw, [1100, 90])
    query = 3 * torch.randn(10, 4, 16, generator=draw)
    agree(pool.run(query, [9, 1], at_once=at_once, **options), pool.expect(query, [9, 1], **options))


@pytest.mark.parametrize("at_once", [False, True])
def test_sinks_take_their_share(draw: torch.Generator, at_once: bool) -> None:
    pool = Pool(draw, [600, 3])
    sinks = torch.randn(4, generator=draw) * 4
    query = torch.randn(12, 4, 16, generator=draw)
    got = pool.run(query, [9, 3], sinks=sinks.to(DEVICE), at_once=at_once)
    agree(got, pool.expect(query, [9, 3], sinks=sinks.double()))


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"window": 200}])
def test_chunks_neighbours_and_splits_do_not_change_bits(
    draw: torch.Generator, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two sequences, one longer than two splits: alone, in a crowd, in chunks, one way or the other."""
    monkeypatch.setattr(ops, "SPLIT", 128)
    pool = Pool(draw, [300, 40], kv_heads=1, k_dim=20, v_dim=20)
    late, other = torch.randn(30, 3, 20, generator=draw), torch.randn(40, 3, 20, generator=draw)
    whole = pool.part(torch.cat([late, other]), [0, 1], [270, 0], [30, 40], at_once=False, **options)
    alone = pool.part(late, [0], [270], [30], at_once=True, **options)
    assert torch.equal(alone, whole[:30])
    for size, at in ((1, 23), (7, 3), (19, 11)):
        query = torch.cat([other[-at % 5 - 1 :], late[at : at + size]])
        first = 40 - (len(query) - size)
        for at_once in (False, True):
            part = pool.part(query, [1, 0], [first, 270 + at], [40 - first, size], at_once=at_once, **options)
            assert torch.equal(part[-size:], whole[at : at + size]), (size, at, at_once)
            assert torch.equal(part[:-size], whole[30 + first :])


def test_unwritten_slots_are_not_read(draw: torch.Generator) -> None:
    pool = Pool(draw, [21])
    query = torch.randn(1, 2, 16, generator=draw)
    expected = pool.run(query, [1])
    last = int(pool.tables[0][1])
    pool.values[last, :, 5:], pool.keys[last, :, :, 5:] = torch.nan, torch.nan
    assert torch.equal(pool.run(query, [1]), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN, under the interpreter
def test_nan_in_a_query_stays_with_it(draw: torch.Generator) -> None:
    pool = Pool(draw, [30, 30])
    query = torch.randn(2, 4, 16, generator=draw)
    expected = pool.run(query, [1, 1])
    query[0, 0, 3] = torch.nan
    got = pool.run(query, [1, 1])
    assert got[0, 0].isnan().all()
    assert torch.equal(got[0, 1:], expected[0, 1:])
    assert torch.equal(got[1], expected[1])


def test_programs_without_a_sequence_write_nothing(draw: torch.Generator) -> None:
    """As in a graph captured for more sequences than there are."""
    pool = Pool(draw, [30])
    query = torch.randn(2, 2, 16, generator=draw)
    sequences = ops.pack_sequences(
        np.array([0, 1]), np.array([29]), pool.tables, 16, groups=[1], device=DEVICE
    )
    block_seq, block_first = sequences.programs[1]
    programs = {1: tuple(torch.cat([t, torch.full_like(t, -1)]) for t in (block_seq, block_first))}
    padded = ops.DeviceSequences(sequences.cu, sequences.starts, sequences.tables, programs, 30)
    for at_once in (False, True):
        got = ops.paged_attention(
            query.to(DEVICE), pool.keys, pool.values, padded, scale=0.3, at_once=at_once
        )
        agree(got[:1].cpu(), pool.expect(query[:1], [1]))


def test_nothing_gives_nothing() -> None:
    sequences = ops.pack_sequences(
        np.zeros(1, np.int64), np.empty(0, np.int64), [], 16, groups=[2], device=DEVICE
    )
    caches = torch.empty(3, 2, 8, 16, device=DEVICE), torch.empty(3, 2, 16, 8, device=DEVICE)
    assert ops.paged_attention(torch.empty(0, 4, 8, device=DEVICE), *caches, sequences, scale=1.0).shape == (
        0,
        4,
        8,
    )


@pytest.mark.parametrize(("stored", "tolerance"), [(torch.int8, 0.005), (torch.float8_e4m3fn, FP8_ERROR)])
def test_keys_and_values_in_one_byte(draw: torch.Generator, stored: torch.dtype, tolerance: float) -> None:
    """Written with a scale a head and token; attention then has the stored values' bits within tolerance."""
    blocks, block_size, kv_heads, dim, length = 6, 4, 2, 20, 18
    keys = torch.zeros(blocks, block_size, kv_heads, dim, device=DEVICE).to(stored).permute(0, 2, 3, 1)
    values = torch.zeros(blocks, block_size, kv_heads, dim, device=DEVICE).to(stored).permute(0, 2, 1, 3)
    scales = tuple(torch.zeros(blocks, block_size, kv_heads, device=DEVICE) for _ in range(2))
    table = torch.randperm(blocks, generator=draw)[:5]
    slots = torch.cat([b * block_size + torch.arange(block_size) for b in table])[:length]
    kv = torch.randn(length, 2 * kv_heads * dim, generator=draw) * torch.linspace(0.01, 9, length)[:, None]
    rotary.rotary_kv_write(
        kv.to(DEVICE),
        rotary.Rotary(),
        slots.to(DEVICE),
        slots.to(DEVICE),
        keys,
        values,
        heads=0,
        scales=scales,
    )
    k, v = (t.unflatten(1, (kv_heads, dim)) for t in kv.split(kv_heads * dim, 1))
    spread = [s.flatten(0, 1)[slots].cpu() for s in scales]
    kept = [
        c.float().flatten(0, 1)[slots].cpu() * s[..., None]
        for c, s in zip((keys.permute(0, 3, 1, 2), values.permute(0, 2, 1, 3)), spread, strict=True)
    ]
    for exact, near in zip((k, v), kept, strict=True):
        assert ((exact - near).abs() <= tolerance * exact.abs().amax(-1, keepdim=True)).all()
    query = torch.randn(3, 6, dim, generator=draw)
    sequences = ops.pack_sequences(
        np.array([0, 3]), np.array([length - 3]), [table.numpy()], block_size, groups=[3], device=DEVICE
    )
    got = ops.paged_attention(query.to(DEVICE), keys, values, sequences, scale=0.2, scales=scales)
    k, v = (t.double() for t in kept)
    agree(got.cpu(), reference.attend(query.double(), k, v, length - 3, scale=0.2))
