"""One model over several processes: its linear layers cut as transformers' own plan says.

A `colwise` layer keeps its share of the outputs (whole heads, whole MLP units), a `rowwise` layer its share
of the inputs, and the shares' results are summed over the group. What lies between two such layers, attention
and its cache included, is then smaller and otherwise as it was. M. Shoeybi et al., "Megatron-LM" (2019).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worker.model.checkpoint import UnsupportedModel

_WHOLE = "embedding_rowwise"  # a lookup, which gains nothing from being cut
_KINDS = ("colwise", "rowwise", "colwise_gather_output", "colwise_rep")


class Summed(nn.Module):
    """A layer of which each process has a share of the inputs; the results are added up."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x).contiguous()
        dist.all_reduce(y)
        return y


class Gathered(nn.Module):
    """A layer of which each process has a share of the outputs; they are put side by side."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        share: Tensor = self.inner(x).contiguous()
        parts = [torch.empty_like(share) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, share)
        return torch.cat(parts, -1)


@torch.no_grad()
def shard(model: Any) -> int:
    """Cut a transformers model in place, for this process of the default group; how many layers were cut.

    Raises UnsupportedModel where the model has no plan, or one that asks for more than cut linear layers.
    """
    plan: Mapping[str, str] = dict(model.tp_plan or {})
    rank, world = dist.get_rank(), dist.get_world_size()
    cut = 0
    for name, module in list(model.named_modules()):
        kind = next((k for pattern, k in plan.items() if _matches(pattern, name)), None)
        if kind in (None, _WHOLE) or (name == "lm_head" and model.config.tie_word_embeddings):
            continue
        if kind not in _KINDS or not isinstance(module, nn.Linear):
            raise UnsupportedModel(f"its plan of tensor parallelism wants {name} {kind}")
        _replace(model, name, _share(module, kind, rank, world, name))
        cut += 1
    if not cut:
        raise UnsupportedModel("it has no plan of tensor parallelism")
    return cut


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _share(layer: nn.Linear, kind: str, rank: int, world: int, name: str) -> nn.Module:
    dim = 1 if kind == "rowwise" else 0
    if layer.weight.shape[dim] % world:
        raise UnsupportedModel(f"{name} cannot be cut into {world} equal shares")
    weight = layer.weight.chunk(world, dim)[rank].clone()
    bias: Tensor | None = layer.bias
    if bias is not None:  # of a sum, one process adds it
        bias = bias.chunk(world)[rank] if dim == 0 else bias if rank == 0 else torch.zeros_like(bias)
    share = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    share.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        share.bias = nn.Parameter(bias.clone(), requires_grad=False)
    if kind == "colwise":
        return share
    return Summed(share) if kind == "rowwise" else Gathered(share)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
