"""Attention over blocks: right for every head shape, and the same bits for any chunking or threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_kernels import paged_attention as ops
from headrace_kernels.dispatch import Backend
from headrace_kernels.paged_attention import reference


class Pool:
    """Caches of one layer and the block tables of some sequences, whose blocks lie scattered."""

    def __init__(
        self,
        draw: torch.Generator,
        lengths: list[int],
        *,
        kv_heads: int = 2,
        k_dim: int = 16,
        v_dim: int = 16,
        block_size: int = 16,
    ) -> None:
        counts = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(counts), generator=draw).numpy()
        self.tables = np.split(order, np.cumsum(counts)[:-1])
        self.keys = torch.randn(sum(counts), kv_heads, k_dim, block_size, generator=draw)
        self.values = torch.randn(sum(counts), kv_heads, block_size, v_dim, generator=draw)
        self.lengths, self.block_size = lengths, block_size

    def run(self, query: Tensor, counts: list[int], on: Backend, **options: object) -> Tensor:
        """query [sum of counts, heads, k_dim]: the last `counts` tokens of each sequence."""
        cu = np.concatenate(([0], np.cumsum(counts)))
        starts = np.array(self.lengths) - np.array(counts)
        sequences = ops.pack_sequences(cu, starts, self.tables, self.block_size)
        return ops.paged_attention(query, self.keys, self.values, sequences, on=on, **options)  # type: ignore[arg-type]

    def expect(self, query: Tensor, counts: list[int], **options: object) -> Tensor:
        out = []
        for q, n, count, table in zip(query.split(counts), self.lengths, counts, self.tables, strict=True):
            k, v = reference.gather(self.keys, self.values, table.tolist(), n)
            out.append(reference.attend(q.double(), k.double(), v.double(), n - count, **options))  # type: ignore[arg-type]
        return torch.cat(out).float()


def _close(got: Tensor, expected: Tensor) -> None:
    assert torch.allclose(got, expected, rtol=2e-5, atol=2e-5), (got - expected).abs().max()


@pytest.mark.parametrize(
    "dims", [(12, 12), (20, 20), (64, 64), (80, 80), (96, 96), (128, 128), (24, 16), (16, 40)]
)
@pytest.mark.parametrize("group", [1, 3, 7])
def test_heads_of_any_size(cpu: Backend, draw: torch.Generator, dims: tuple[int, int], group: int) -> None:
    pool = Pool(draw, [70, 5, 33], k_dim=dims[0], v_dim=dims[1])
    counts = [1, 5, 17]
    query = torch.randn(sum(counts), 2 * group, dims[0], generator=draw)
    scale = dims[0] ** -0.5
    _close(pool.run(query, counts, cpu, scale=scale), pool.expect(query, counts, scale=scale))


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 48, 64, 128])
def test_blocks_of_any_size(cpu: Backend, draw: torch.Generator, block_size: int) -> None:
    pool = Pool(draw, [131, 64, 1], block_size=block_size)
    counts = [40, 1, 1]
    query = torch.randn(sum(counts), 6, 16, generator=draw)
    _close(pool.run(query, counts, cpu, scale=0.3), pool.expect(query, counts, scale=0.3))


@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"window": 40}, {"window": 200}, {"softcap": 5.0}, {"window": 66, "softcap": 20.0}],
)
def test_windows_and_caps(cpu: Backend, draw: torch.Generator, options: dict[str, float]) -> None:
    pool = Pool(draw, [150, 90])
    counts = [150, 1]
    query = 3 * torch.randn(sum(counts), 4, 16, generator=draw)
    _close(
        pool.run(query, counts, cpu, scale=0.5, **options), pool.expect(query, counts, scale=0.5, **options)
    )


def test_sinks_take_their_share(cpu: Backend, draw: torch.Generator) -> None:
    pool = Pool(draw, [100, 3])
    counts, sinks = [9, 3], torch.randn(4, generator=draw) * 4
    query = torch.randn(sum(counts), 4, 16, generator=draw)
    _close(
        pool.run(query, counts, cpu, scale=0.2, sinks=sinks),
        pool.expect(query, counts, scale=0.2, sinks=sinks.double()),
    )


@pytest.mark.parametrize("window", [0, 50])
def test_chunks_and_neighbours_do_not_change_bits(cpu: Backend, draw: torch.Generator, window: int) -> None:
    pool = Pool(draw, [200, 77], kv_heads=3, k_dim=20, v_dim=20)
    queries = torch.randn(200, 9, 20, generator=draw), torch.randn(77, 9, 20, generator=draw)
    whole = pool.run(torch.cat(queries), [200, 77], cpu, scale=0.2, window=window)
    for step in (1, 16, 61):
        for at in range(0, 200, step):
            size = min(step, 200 - at)
            other = min(77, at % 7 + 1)
            sequences = ops.pack_sequences(
                np.array([0, size, size + other]), np.array([at, 77 - other]), pool.tables, 16
            )
            query = torch.cat([queries[0][at : at + size], queries[1][77 - other :]])
            part = ops.paged_attention(
                query, pool.keys, pool.values, sequences, scale=0.2, window=window, on=cpu
            )
            assert torch.equal(part[:size], whole[at : at + size]), (step, at)
            assert torch.equal(part[size:], whole[277 - other :])


def test_instruction_sets_and_threads_agree(every_cpu: list[Backend], draw: torch.Generator) -> None:
    pool = Pool(draw, [130, 47, 1], k_dim=20, v_dim=36)
    counts = [30, 1, 1]
    query = torch.randn(32, 6, 20, generator=draw)
    sinks = torch.randn(6, generator=draw)
    results = []
    for on in every_cpu:
        for threads in (1, 3):
            on.library.hr_set_threads(threads)
            results.append(pool.run(query, counts, on, scale=0.4, softcap=9.0, window=90, sinks=sinks))
        on.library.hr_set_threads(2)
    assert all(torch.equal(results[0], r) for r in results)


def test_unwritten_slots_are_not_read(cpu: Backend, draw: torch.Generator) -> None:
    pool = Pool(draw, [21])
    query = torch.randn(1, 2, 16, generator=draw)
    expected = pool.run(query, [1], cpu, scale=1.0)
    last = int(pool.tables[0][1])
    pool.values[last, :, 5:] = torch.nan
    assert torch.equal(pool.run(query, [1], cpu, scale=1.0), expected)


def test_nan_in_a_query_stays_with_it(cpu: Backend, draw: torch.Generator) -> None:
    pool = Pool(draw, [30, 30])
    query = torch.randn(2, 4, 16, generator=draw)
    expected = pool.run(query, [1, 1], cpu, scale=1.0)
    query[0, 0, 3] = torch.nan
    got = pool.run(query, [1, 1], cpu, scale=1.0)
    assert got[0, 0].isnan().all()
    assert torch.equal(got[1], expected[1])


def test_nothing_gives_nothing(cpu: Backend) -> None:
    sequences = ops.pack_sequences(np.zeros(1, np.int64), np.empty(0, np.int64), [], 16)
    out = ops.paged_attention(
        torch.empty(0, 4, 8), torch.empty(3, 2, 8, 16), torch.empty(3, 2, 16, 8), sequences, scale=1.0, on=cpu
    )
    assert out.shape == (0, 4, 8)


def test_wrong_arguments_are_refused(cpu: Backend, draw: torch.Generator) -> None:
    pool = Pool(draw, [20])
    with pytest.raises(ValueError, match="does not cover"):
        ops.pack_sequences(np.array([0, 1]), np.array([32]), pool.tables, 16)
    with pytest.raises(ValueError, match="cannot share"):
        pool.run(torch.empty(1, 3, 16), [1], cpu, scale=1.0)
    with pytest.raises(ValueError, match="query must be"):
        pool.run(torch.empty(1, 4, 12), [1], cpu, scale=1.0)
    sequences = ops.pack_sequences(np.array([0, 1]), np.array([3]), pool.tables, 16)
    with pytest.raises(ValueError, match="sequences of 1"):
        ops.paged_attention(torch.empty(2, 4, 16), pool.keys, pool.values, sequences, scale=1.0, on=cpu)
