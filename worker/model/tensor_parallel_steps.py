"""Steps of a model that several processes share: the first tells the others what to compute, then all do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from worker.engine.plan import SequencePlan, StepPlan
from worker.model.inputs import StepInputs, build_inputs
from worker.model.kv import KVCache, LayerShape
from worker.model.selftest import Forward
from worker.model.tensor_parallel_wire import Channel, Copies, NewCache, Step, pack_numbers, unpack_numbers


class ParallelModel:
    """The first process's share as a whole model: every step is a message to the others, then a forward pass.

    Works over one cache at a time, whose block copies it passes on as well. From one thread, in order.
    """

    def __init__(
        self, share: Forward, send: Callable[[msgspec.Struct], None], on_failure: Callable[[Exception], None]
    ) -> None:
        """`send` reaches all other processes; `on_failure` is told of a step that raised here."""
        self.way = share.way
        self._share = share
        self._send = send
        self._on_failure = on_failure
        self._kv: KVCache | None = None
        self._copies: list[Copies] = []

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Of this process's share."""
        return self._share.layers

    def logits(self, inputs: StepInputs, kv: KVCache, rows: Tensor) -> Tensor:
        """As PackedModel.logits."""
        try:
            if kv is not self._kv:
                self._adopt(kv)
            self._send(make_step(inputs, rows, self._copies))
            self._copies.clear()
            return self._share.logits(inputs, kv, rows)
        except Exception as error:
            self._on_failure(error)
            raise

    def _adopt(self, kv: KVCache) -> None:
        copy_here = kv.copy_blocks

        def copy_blocks(copies: Sequence[tuple[int, int]]) -> None:
            if copies:
                self._copies.append(tuple(copies))
            copy_here(copies)

        kv.copy_blocks = copy_blocks  # type: ignore[method-assign]
        self._kv = kv
        self._copies.clear()
        self._send(NewCache(kv.num_blocks, kv.block_size, str(kv.dtype).removeprefix("torch.")))


def make_step(inputs: StepInputs, rows: Tensor, copies: Sequence[Copies]) -> Step:
    return Step(
        token_ids=pack_numbers(inputs.token_ids[0].cpu()),
        lens=pack_numbers(inputs.query_lens),
        starts=pack_numbers(inputs.starts),
        tables=pack_numbers(inputs.tables),
        table_lens=pack_numbers(np.diff(inputs.table_starts)),
        rows=pack_numbers(rows.cpu()),
        copies=tuple(copies),
    )


def plan_of(step: Step) -> StepPlan:
    """Its sequences, of which nothing is drawn."""
    ids = _split(step.token_ids, step.lens)
    tables = _split(step.tables, step.table_lens)
    starts = unpack_numbers(step.starts).tolist()
    parts = enumerate(zip(ids, starts, tables, strict=True))
    return StepPlan(0, tuple(SequencePlan(i, part, start, table, None) for i, (part, start, table) in parts))


def _split(packed: bytes, lens: bytes) -> list[list[int]]:
    values = unpack_numbers(packed).tolist()
    bounds = [0, *np.cumsum(unpack_numbers(lens)).tolist()]
    return [values[first:last] for first, last in pairwise(bounds)]


@torch.inference_mode()
def follow(channel: Channel, share: Forward, device: torch.device) -> None:
    """Computes what the first process says, over a cache of its own, until that one closes."""
    kv: KVCache | None = None
    message: Any
    while (message := channel.receive(NewCache | Step)) is not None:
        if isinstance(message, NewCache):
            kv = None  # frees the old one first
            dtype = getattr(torch, message.dtype)
            kv = KVCache(share.layers, message.num_blocks, message.block_size, dtype, device)
        elif kv is None:
            raise RuntimeError("a step came before its cache")
        else:
            _run(message, kv, share, device)


def _run(step: Step, kv: KVCache, share: Forward, device: torch.device) -> None:
    for copies in step.copies:
        kv.copy_blocks(copies)
    inputs = build_inputs(plan_of(step), kv.block_size, device)
    share.logits(inputs, kv, torch.from_numpy(unpack_numbers(step.rows)).to(device))
