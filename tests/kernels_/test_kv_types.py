"""Keys and values in two bytes or one: written as the reference rounds them, and read so by every query."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_kernels import paged_attention as ops
from headrace_kernels import rotary_kv
from headrace_kernels.dispatch import Backend
from headrace_kernels.paged_attention import reference
from headrace_kernels.rotary_kv.reference import narrow, quantise

NARROW = [torch.float16, torch.bfloat16, torch.int8]
# Of attention over unit normal keys and values, beside fp32's: what rounding of this type may cost.
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.int8: 4e-2}


class Pool:
    """Sequences whose keys and values were written through `rotary_kv_write`, in scattered blocks."""

    def __init__(
        self,
        draw: torch.Generator,
        lengths: list[int],
        dtype: torch.dtype,
        on: Backend,
        *,
        dims: tuple[int, int] = (16, 16),
        kv_heads: int = 2,
        block_size: int = 16,
    ) -> None:
        counts = [-(-n // block_size) for n in lengths]
        blocks = sum(counts)
        order = torch.randperm(blocks, generator=draw).numpy()
        self.tables = np.split(order, np.cumsum(counts)[:-1])
        self.lengths, self.block_size, self.on = lengths, block_size, on
        self.keys = torch.zeros(blocks, kv_heads, dims[0], block_size, dtype=dtype)
        self.values = torch.zeros(blocks, kv_heads, block_size, dims[1], dtype=dtype)
        scale = torch.zeros(blocks, kv_heads, block_size)
        self.scales = (scale, scale.clone()) if dtype == torch.int8 else None
        self.k = [torch.randn(n, kv_heads, dims[0], generator=draw) for n in lengths]
        self.v = [torch.randn(n, kv_heads, dims[1], generator=draw) for n in lengths]

    def write(self, sequence: int, first: int, last: int) -> None:
        k, v = self.k[sequence][first:last].flatten(1), self.v[sequence][first:last].flatten(1)
        positions = torch.arange(first, last)
        table = torch.from_numpy(self.tables[sequence])
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        rotary_kv.rotary_kv_write(
            torch.cat([k, v], 1).contiguous(),
            rotary_kv.rotary(None, None),
            positions,
            slots,
            self.keys,
            self.values,
            heads=0,
            scales=self.scales,
            on=self.on,
        )

    def write_all(self) -> None:
        for i, n in enumerate(self.lengths):
            self.write(i, 0, n)

    def attend(self, query: Tensor, which: list[int], counts: list[int], **options: object) -> Tensor:
        starts = np.array([self.lengths[i] for i in which]) - np.array(counts)
        cu = np.concatenate(([0], np.cumsum(counts)))
        sequences = ops.pack_sequences(cu, starts, [self.tables[i] for i in which], self.block_size)
        return ops.paged_attention(
            query, self.keys, self.values, sequences, scales=self.scales, on=self.on, **options
        )  # type: ignore[arg-type]

    def expect(self, query: Tensor, counts: list[int], rounded: bool, **options: object) -> Tensor:
        out, dtype = [], self.keys.dtype
        for q, k, v, count in zip(query.split(counts), self.k, self.v, counts, strict=True):
            if rounded:
                k, v = stored(k, dtype), stored(v, dtype)
            out.append(
                reference.attend(q.double(), k.double(), v.double(), len(k) - count, **options)  # type: ignore[arg-type]
            )
        return torch.cat(out).float()


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != torch.int8:
        return narrow(x, dtype).float()
    bytes_, scale = quantise(x)
    return bytes_.float() * scale[..., None]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("dims", "group", "block_size"),
    [((12, 12), 3, 16), ((20, 36), 7, 5), ((64, 64), 3, 16), ((80, 96), 1, 48), ((24, 16), 1, 1)],
)
def test_any_shape(
    cpu: Backend,
    draw: torch.Generator,
    dtype: torch.dtype,
    dims: tuple[int, int],
    group: int,
    block_size: int,
) -> None:
    pool = Pool(draw, [133, 5, 33], dtype, cpu, dims=dims, block_size=block_size)
    pool.write_all()
    counts, options = [1, 5, 17], {"scale": dims[0] ** -0.5, "window": 70, "softcap": 30.0}
    query = torch.randn(sum(counts), 2 * group, dims[0], generator=draw)
    got = pool.attend(query, [0, 1, 2], counts, **options)
    exact = pool.expect(query, counts, rounded=True, **options)
    assert torch.allclose(got, exact, rtol=2e-5, atol=2e-5), (got - exact).abs().max()
    error = (got - pool.expect(query, counts, rounded=False, **options)).abs().max()
    assert 0 < float(error) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", NARROW)
def test_what_is_written_is_what_the_reference_rounds_to(
    cpu: Backend, draw: torch.Generator, dtype: torch.dtype
) -> None:
    """Bit for bit: subnormals, ties, what is too large for fp16, a head of zeros."""
    pool = Pool(draw, [64], dtype, cpu, dims=(20, 36))
    pool.k[0] *= torch.logspace(-9, 7, 64)[:, None, None]
    pool.v[0][3, 1] = 0.0
    pool.v[0][4, 0, :4] = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8])
    pool.write_all()
    table = pool.tables[0].tolist()
    k, v = reference.gather(pool.keys, pool.values, table, 64)
    for x, kept, scales in ((pool.k[0], k, 0), (pool.v[0], v, 1)):
        if dtype != torch.int8:
            assert torch.equal(kept, narrow(x, dtype))
            continue
        assert pool.scales is not None
        bytes_, scale = quantise(x)
        assert torch.equal(kept, bytes_)
        assert torch.equal(pool.scales[scales][table].transpose(1, 2).reshape(64, 2), scale)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("window", [0, 50])
def test_chunks_and_neighbours_do_not_change_bits(
    cpu: Backend, draw: torch.Generator, dtype: torch.dtype, window: int
) -> None:
    """A prompt written and read in parts, as decodes or beside another, gives what it gives as a whole."""
    pool = Pool(draw, [150, 77], dtype, cpu, kv_heads=3, dims=(20, 20))
    queries = torch.randn(150, 9, 20, generator=draw), torch.randn(77, 9, 20, generator=draw)
    pool.write_all()
    whole = pool.attend(torch.cat(queries), [0, 1], [150, 77], scale=0.2, window=window)
    kept = pool.keys.clone(), pool.values.clone()
    for step in (1, 16, 61):
        pool.keys.zero_()
        pool.values.zero_()
        pool.write(1, 0, 77)
        for at in range(0, 150, step):
            end = min(150, at + step)
            pool.write(0, at, end)
            other = at % 7 + 1
            sequences = ops.pack_sequences(
                np.array([0, end - at, end - at + other]), np.array([at, 77 - other]), pool.tables, 16
            )
            part = ops.paged_attention(
                torch.cat([queries[0][at:end], queries[1][77 - other :]]),
                pool.keys,
                pool.values,
                sequences,
                scale=0.2,
                window=window,
                scales=pool.scales,
                on=cpu,
            )
            assert torch.equal(part[: end - at], whole[at:end]), (step, at)
            assert torch.equal(part[end - at :], whole[227 - other :])
        assert torch.equal(pool.keys, kept[0])
        assert torch.equal(pool.values, kept[1])


@pytest.mark.parametrize("dtype", NARROW)
def test_instruction_sets_and_threads_agree(
    every_cpu: list[Backend], draw: torch.Generator, dtype: torch.dtype
) -> None:
    results = []
    for on in every_cpu:
        pool = Pool(torch.Generator().manual_seed(5), [130, 47, 1], dtype, on, dims=(20, 36))
        query = torch.randn(32, 6, 20, generator=torch.Generator().manual_seed(6))
        for threads in (1, 3):
            on.library.hr_set_threads(threads)
            pool.write_all()
            results.append(pool.attend(query, [0, 1, 2], [30, 1, 1], scale=0.4, softcap=9.0))
        on.library.hr_set_threads(2)
    assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_sequence(
    cpu: Backend, draw: torch.Generator, dtype: torch.dtype, bad: float
) -> None:
    pool = Pool(draw, [30, 30], dtype, cpu)
    pool.write_all()
    query = torch.randn(2, 4, 16, generator=draw)
    expected = pool.attend(query, [0, 1], [1, 1], scale=1.0)
    pool.v[0][7, 1, 3] = bad
    pool.write_all()
    got = pool.attend(query, [0, 1], [1, 1], scale=1.0)
    assert torch.equal(got[1], expected[1])
    if dtype == torch.float16 and bad == torch.inf:  # it becomes the largest number
        assert got.isfinite().all()
    else:
        assert not got[0, 2:].isfinite().all(-1).any()
    assert torch.equal(got[0, :2], expected[0, :2])


def test_wrong_caches_are_refused(cpu: Backend, draw: torch.Generator) -> None:
    pool = Pool(draw, [20], torch.int8, cpu)
    query = torch.randn(1, 4, 16, generator=draw)
    whole, pool.scales = pool.scales, None
    with pytest.raises(ValueError, match="scales: False"):
        pool.attend(query, [0], [1], scale=1.0)
    assert whole is not None
    pool.scales = (whole[0].transpose(1, 2), whole[1])
    with pytest.raises(ValueError, match="scales must be"):
        pool.attend(query, [0], [1], scale=1.0)
    pool.scales, pool.values = None, pool.values.half()
    with pytest.raises(ValueError, match=r"values of torch\.float16"):
        pool.attend(query, [0], [1], scale=1.0)
