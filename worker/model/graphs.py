"""Decode steps as CUDA graphs: captured once for a few batch sizes, fed by one copy, replayed as one launch.

A step of fewer sequences runs in the next larger graph; the places left over have no sequence and no slot, so
they read and write no blocks. Rows do not depend on each other, so neither padding nor the choice of graph
changes a bit. Prefill and mixed steps run as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor

from headrace_kernels.paged_attention.triton import DeviceSequences
from worker.model.inputs import StepInputs
from worker.model.kv import KVCache, LayerShape
from worker.model.transfer import send, staged
from worker.model.triton_model import DeviceStep, TritonModel

log = structlog.get_logger()
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32)
_COLUMNS = 5  # ids, positions, slots, starts, sequence of each program


class StepBuffers:
    """What a captured step reads, at fixed addresses: one int32 buffer, and what never changes."""

    def __init__(
        self, batch: int, table_width: int, groups: Sequence[int], longest: int, device: torch.device
    ) -> None:
        size = batch * (_COLUMNS + table_width)
        self.batch = batch
        self._host = torch.zeros(size, dtype=torch.int32)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._columns = self._host.numpy()[: batch * _COLUMNS].reshape(_COLUMNS, batch)
        self._tables = self._host.numpy()[batch * _COLUMNS :].reshape(batch, table_width)
        ids, positions, slots, starts, programs = self._device[: batch * _COLUMNS].view(_COLUMNS, batch)
        tables = self._device[batch * _COLUMNS :].view(batch, table_width)
        numbers = torch.arange(batch + 1, dtype=torch.int32, device=device)
        rows = numbers[:batch]
        sequences = DeviceSequences(numbers, starts, tables, {g: (programs, rows) for g in groups}, longest)
        self.step = DeviceStep(ids, positions, slots, rows, sequences)

    def fill(self, inputs: StepInputs) -> None:
        """inputs of at most `batch` sequences of one token each, on the host."""
        count = len(inputs.starts)
        tensors = (inputs.token_ids[0], inputs.positions[0], inputs.slots)
        self._columns[:3, :count] = [t.cpu().numpy() for t in tensors]
        self._columns[3, :count] = inputs.starts
        self._columns[4, :count] = np.arange(count)
        self._columns[:, count:] = np.array([0, 0, -1, 0, -1])[:, None]
        for row, table in zip(self._tables, inputs.block_tables, strict=False):
            row[: len(table)] = table
        self._device.copy_(staged(self._host, self._device.device), non_blocking=True)
        if inputs.fed is not None:
            inputs.fed.into(self.step.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    buffers: StepBuffers
    logits: Tensor  # [batch, vocab], written by each replay
    graph: torch.cuda.CUDAGraph


class GraphedModel:
    """A TritonModel bound to one cache whose decode steps are replayed. Same interface."""

    way = "triton"
    takes_fed = True

    def __init__(
        self, model: TritonModel, kv: KVCache, max_len: int, batch_sizes: Sequence[int] = BATCH_SIZES
    ) -> None:
        self.model, self.kv = model, kv
        model.grow_tables(max_len)  # replays read them where they were when captured
        width = -(-max_len // kv.block_size)
        pool: object = None
        self._graphs: list[Graph] = []
        for batch in sorted(batch_sizes, reverse=True):  # the largest first: the others fit in its memory
            buffers = StepBuffers(batch, width, model.groups, max_len, model.device)
            self._graphs.append(_capture(model, kv, buffers, pool))
            pool = pool or self._graphs[0].graph.pool()
        self._graphs.reverse()
        log.info("graphs_captured", batch_sizes=sorted(batch_sizes))

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return self.model.layers

    def logits(self, inputs: StepInputs, kv: KVCache, rows: Tensor) -> Tensor:
        """As PackedModel.logits; of a decode step they are overwritten by the next."""
        graph = self._graph_for(inputs, kv)
        if graph is None:
            return self.model.logits(inputs, kv, rows)
        graph.buffers.fill(inputs)
        graph.graph.replay()
        if len(rows) == len(inputs.starts):
            return graph.logits[: len(rows)]
        return graph.logits.index_select(0, send(rows, graph.logits.device))

    def _graph_for(self, inputs: StepInputs, kv: KVCache) -> Graph | None:
        if kv is not self.kv or not is_decode(inputs):
            return None
        return next((g for g in self._graphs if g.buffers.batch >= len(inputs.starts)), None)


def is_decode(inputs: StepInputs) -> bool:
    """Whether every sequence has one token."""
    return inputs.token_ids.shape[1] == len(inputs.starts)


def _capture(model: TritonModel, kv: KVCache, buffers: StepBuffers, pool: object) -> Graph:
    """With no sequence in it: kernels compile and nothing is written to the cache."""
    buffers.step.slots.fill_(-1)
    buffers.step.sequences.programs[model.groups[0]][0].fill_(-1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(side):
        model.run(buffers.step, kv)  # what is compiled or loaded on first use must not be captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
        logits = model.run(buffers.step, kv)
    return Graph(buffers, logits, graph)


def with_graphs(forward: Any, kv: KVCache, max_len: int) -> Any:
    """`forward` with its decode steps captured where that is possible: Triton's model on a CUDA device."""
    if isinstance(forward, TritonModel) and forward.device.type == "cuda":
        return GraphedModel(forward, kv, min(max_len, kv.num_blocks * kv.block_size))
    return forward
