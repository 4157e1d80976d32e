"""From a StepPlan to tensors: all tokens of all sequences in one packed row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.engine.plan import SequencePlan, StepPlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fed:
    """Packed tokens that only the device knows: `ids` [P] belong at `places` [P]; both are there."""

    places: Tensor
    ids: Tensor

    def into(self, token_ids: Tensor) -> None:
        """token_ids [T], on the device."""
        token_ids.index_copy_(0, self.places, self.ids.to(token_ids.dtype))


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's packed tokens, T in all, of S sequences in the plan's order."""

    token_ids: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64
    slots: Tensor  # [T] int64: where each token's key and value go
    cu_seqlens: Ints  # [S + 1]: sequence i owns tokens cu_seqlens[i] to cu_seqlens[i + 1]
    starts: Ints  # [S]: tokens already in the blocks
    tables: Ints  # the block tables of all sequences, one after another
    table_starts: Ints  # [S + 1]: sequence i has tables[table_starts[i]] to tables[table_starts[i + 1] - 1]
    fresh_blocks: Ints  # blocks whose first slot is written in this step
    block_size: int
    fed: Fed | None = None  # replaces tokens that the step before draws

    @property
    def query_lens(self) -> Ints:
        return np.diff(self.cu_seqlens)

    @property
    def kv_lens(self) -> Ints:
        """[S]: tokens in the blocks once this step is written."""
        return self.starts + self.query_lens

    @property
    def block_tables(self) -> tuple[Ints, ...]:
        """For each sequence, a view."""
        return tuple(self.tables[a:b] for a, b in pairwise(self.table_starts.tolist()))

    def block_table(self, sequence: int | np.integer) -> Ints:
        return self.tables[self.table_starts[sequence] : self.table_starts[sequence + 1]]


def slots_at(block_table: Ints, positions: Ints, block_size: int) -> Ints:
    return block_table[positions // block_size] * block_size + positions % block_size


def build_inputs(plan: StepPlan, block_size: int, device: torch.device | str = "cpu") -> StepInputs:
    """Raises ValueError where a block table does not cover its sequence."""
    sequences = plan.sequences
    lens = _counts(len(s.token_ids) for s in sequences)
    starts = _counts(s.start for s in sequences)
    table_lens = _counts(len(s.block_table) for s in sequences)
    _check_covered(sequences, lens, starts, table_lens, block_size)
    cu_seqlens, table_starts = _cumulated(lens), _cumulated(table_lens)
    tables = _joined((s.block_table for s in sequences), table_starts)
    ids = _joined((s.token_ids for s in sequences), cu_seqlens)
    positions = np.arange(len(ids)) + np.repeat(starts - cu_seqlens[:-1], lens)
    blocks = tables[positions // block_size + np.repeat(table_starts[:-1], lens)]
    slots = blocks * block_size + positions % block_size
    return StepInputs(
        token_ids=torch.from_numpy(ids)[None].to(device),
        positions=torch.from_numpy(positions)[None].to(device),
        slots=torch.from_numpy(slots).to(device),
        cu_seqlens=cu_seqlens,
        starts=starts,
        tables=tables,
        table_starts=table_starts,
        fresh_blocks=slots[slots % block_size == 0] // block_size,
        block_size=block_size,
    )


def _counts(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, np.int64)


def _cumulated(lens: Ints) -> Ints:
    out = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=out[1:])
    return out


def _joined(parts: Iterable[Sequence[int]], ends: Ints) -> Ints:
    """One after another, in one pass over numbers and not over sequences."""
    return np.fromiter(chain.from_iterable(parts), np.int64, int(ends[-1]))


def _check_covered(
    sequences: Sequence[SequencePlan], lens: Ints, starts: Ints, table_lens: Ints, block_size: int
) -> None:
    bad = (lens == 0) | (table_lens * block_size < starts + lens)
    if bad.any():
        s = sequences[int(bad.argmax())]
        raise ValueError(
            f"sequence {s.seq_id}: {len(s.block_table)} blocks of {block_size} do not cover "
            f"{len(s.token_ids)} tokens from {s.start}"
        )
