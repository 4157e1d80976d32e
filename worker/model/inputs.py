"""From a StepPlan to tensors: all tokens of all sequences in one packed row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.engine.plan import SequencePlan, StepPlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's packed tokens, T in all, of S sequences in the plan's order."""

    token_ids: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64
    slots: Tensor  # [T] int64: where each token's key and value go
    cu_seqlens: Ints  # [S + 1]: sequence i owns tokens cu_seqlens[i] to cu_seqlens[i + 1]
    starts: Ints  # [S]: tokens already in the blocks
    block_tables: tuple[Ints, ...]  # for each sequence
    fresh_blocks: Ints  # blocks whose first slot is written in this step
    block_size: int

    @property
    def query_lens(self) -> Ints:
        return np.diff(self.cu_seqlens)

    @property
    def kv_lens(self) -> Ints:
        """[S]: tokens in the blocks once this step is written."""
        return self.starts + self.query_lens

    def slots_of(self, sequence: int, first: int, last: int) -> Ints:
        """Slots of the positions first … last - 1 of a sequence."""
        return slots_at(self.block_tables[sequence], np.arange(first, last), self.block_size)


def slots_at(block_table: Ints, positions: Ints, block_size: int) -> Ints:
    return block_table[positions // block_size] * block_size + positions % block_size


def build_inputs(plan: StepPlan, block_size: int, device: torch.device | str = "cpu") -> StepInputs:
    """Raises ValueError where a block table does not cover its sequence."""
    sequences = plan.sequences
    lens = np.fromiter((len(s.token_ids) for s in sequences), np.int64, len(sequences))
    starts = np.fromiter((s.start for s in sequences), np.int64, len(sequences))
    tables = tuple(np.asarray(s.block_table, np.int64) for s in sequences)
    positions = [np.arange(s.start, s.start + len(s.token_ids)) for s in sequences]
    slots = [
        _checked_slots(s, t, p, block_size) for s, t, p in zip(sequences, tables, positions, strict=True)
    ]
    all_slots = np.concatenate(slots)
    all_ids = np.concatenate([np.asarray(s.token_ids, np.int64) for s in sequences])
    return StepInputs(
        token_ids=torch.from_numpy(all_ids)[None].to(device),
        positions=torch.from_numpy(np.concatenate(positions))[None].to(device),
        slots=torch.from_numpy(all_slots).to(device),
        cu_seqlens=np.concatenate(([0], np.cumsum(lens))),
        starts=starts,
        block_tables=tables,
        fresh_blocks=all_slots[all_slots % block_size == 0] // block_size,
        block_size=block_size,
    )


def _checked_slots(sequence: SequencePlan, table: Ints, positions: Ints, block_size: int) -> Ints:
    if len(positions) == 0 or len(table) * block_size <= positions[-1]:
        raise ValueError(
            f"sequence {sequence.seq_id}: {len(table)} blocks of {block_size} do not cover "
            f"{len(positions)} tokens from {sequence.start}"
        )
    return slots_at(table, positions, block_size)
