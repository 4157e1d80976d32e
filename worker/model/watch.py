"""Sends a few tokens through a transformers decoder and records what its attention modules are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from worker.model.packed import PackedModel
from worker.model.tiles import AttentionCall

PROBE_POSITIONS = (3, 0, 17, 30, 8)


class NotFusable(Exception):
    """The model is not a decoder of the kind that the compiled step computes; the message says why."""


@dataclass(slots=True)
class Seen:
    """One attention layer's call."""

    module: nn.Module
    hidden: Tensor  # [T, hidden], what its projections read
    tables: tuple[Tensor, Tensor] | None  # cos, sin [1, T, dims] handed to it
    q: Tensor  # [T, heads, k_dim] after norms and rotation
    k: Tensor
    call: AttentionCall


@dataclass(slots=True)
class Watched:
    layers: list[Seen] = field(default_factory=list)
    rotaries: list[tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Tensor]] = field(default_factory=list)
    pending: tuple[Tensor, tuple[Tensor, Tensor] | None] | None = None
    first_input: Tensor | None = None  # [T, hidden], what the first layer reads


def watch(packed: PackedModel, ids: Tensor) -> Watched:
    watched = Watched()
    positions = torch.tensor(PROBE_POSITIONS)[None]
    with _recording(packed, positions, watched):
        packed.model(input_ids=ids, position_ids=positions, use_cache=False)
    return watched


@contextmanager
def _recording(packed: PackedModel, positions: Tensor, watched: Watched) -> Iterator[None]:
    attention = {id_ for id_ in packed.context.layers}
    hooks = []

    def enters(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if hidden is not None:
            watched.pending = (hidden[0], kwargs.get("position_embeddings"))

    def leaves(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if _is_tables(output, positions.shape[1]):
            watched.rotaries.append((_table_source(module, args, kwargs, positions), output[0]))

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        if watched.pending is None:
            raise NotFusable("its attention takes no hidden states")
        hidden, tables = watched.pending
        seen = Seen(module, hidden, tables, q[0].transpose(0, 1), k[0].transpose(0, 1), call)
        watched.layers.append(seen)
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def first_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if watched.first_input is None:
            watched.first_input = kwargs.get("hidden_states", args[0] if args else None)[0].clone()  # type: ignore[index]

    modules = [m for m in packed.model.modules() if id(m) in attention]
    try:
        for module in modules:
            hooks.append(module.register_forward_pre_hook(enters, with_kwargs=True))
        for owner in owners_of(packed.model, modules[:1]):
            hooks.append(owner.register_forward_pre_hook(first_layer, with_kwargs=True))
        for module in packed.model.modules():
            if not any(True for _ in module.parameters()):
                hooks.append(module.register_forward_hook(leaves, with_kwargs=True))
        packed.context.attend = attend  # type: ignore[method-assign]
        yield
    finally:
        packed.context.__dict__.pop("attend", None)
        for hook in hooks:
            hook.remove()


def _is_tables(output: Any, tokens: int) -> bool:
    if not isinstance(output, tuple) or len(output) != 2 or not all(isinstance(t, Tensor) for t in output):
        return False
    return output[0].shape == output[1].shape and output[0].ndim == 3 and output[0].shape[1] == tokens


def _table_source(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], positions: Tensor
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The module's tables at other positions: its own call with the positions replaced."""

    def swap(value: Any, wanted: Tensor) -> Any:
        is_positions = (
            isinstance(value, Tensor) and value.dtype == torch.int64 and value.shape == positions.shape
        )
        return wanted if is_positions and torch.equal(value, positions) else value

    def source(wanted: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = module(*(swap(a, wanted) for a in args), **{k: swap(v, wanted) for k, v in kwargs.items()})
        return cos, sin

    return source


def owners_of(model: nn.Module, attention: Sequence[nn.Module]) -> list[nn.Module]:
    """The decoder layer that holds each attention module."""
    wanted = {id(module) for module in attention}
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    if len({id(parents[i]) for i in wanted}) != len(attention):
        raise NotFusable("its attention modules are not each in a layer of their own")
    return [parents[id(module)] for module in attention]
