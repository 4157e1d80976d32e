"""One model over several processes: its linear layers cut as transformers' own plan says.

A `colwise` layer keeps its share of the outputs (whole heads, whole MLP units), a `rowwise` layer its share
of the inputs, and the shares' results are summed over the group. What lies between two such layers, attention
and its cache included, is then smaller and otherwise as it was. M. Shoeybi et al., "Megatron-LM" (2019).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worker.model.checkpoint import UnsupportedModel

# Left whole: a lookup, which gains nothing from being cut, and the norms of single heads.
_WHOLE = (None, "embedding_rowwise", "replicated_with_grad_allreduce")
_GATHERED = ("colwise_gather_output", "colwise_rep")
_KINDS = ("colwise", "rowwise", *_GATHERED)
Cuts = Mapping[str, str]  # a layer's name → the kind of its cut


class Summed(nn.Module):
    """A layer of which each process has a share of the inputs; the results are added up."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        shares = _all_shares(self.inner(x))
        total = shares[0].float()
        for share in shares[1:]:
            total += share.float()
        return total.to(x.dtype)


class Gathered(nn.Module):
    """A layer of which each process has a share of the outputs; they are put side by side."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(_all_shares(self.inner(x)), -1)


def _all_shares(mine: Tensor) -> list[Tensor]:
    """Of every process, in the order of ranks.

    An all_reduce would choose the order of its sum by the tensor's size, so that bits depended on the batch.
    """
    mine = mine.contiguous()
    shares = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, mine)
    return shares


def find_cuts(model: Any, world: int) -> Cuts:
    """The layers of a whole transformers model that are cut for `world` processes.

    Raises UnsupportedModel where it has no plan, or one that asks for more than cut linear layers, or where
    something does not come out even.
    """
    plan: Mapping[str, str] = dict(model.tp_plan or {})
    if not plan:
        raise UnsupportedModel("it has no plan of tensor parallelism")
    _check_heads(model.config.get_text_config(), world)
    cuts = {}
    for name, module in model.named_modules():
        kind = next((k for pattern, k in plan.items() if _matches(pattern, name)), None)
        if kind in _WHOLE or (name == "lm_head" and model.config.tie_word_embeddings):
            continue
        if kind not in _KINDS or not isinstance(module, nn.Linear):
            raise UnsupportedModel(f"its plan of tensor parallelism wants {name} {kind}")
        even = module.weight.shape[_cut_dim(kind)] % world == 0
        if not even and kind not in _GATHERED:
            raise UnsupportedModel(f"{name} cannot be cut into {world} equal shares")
        if even:
            cuts[name] = kind
    if "rowwise" not in cuts.values():
        raise UnsupportedModel("its plan of tensor parallelism leaves its layers whole")
    return cuts


@torch.no_grad()
def shard(model: Any, cuts: Cuts) -> None:
    """Cut a transformers model in place, for this process of the default group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, kind in cuts.items():
        _replace(model, name, _share(model.get_submodule(name), kind, rank, world))


def _check_heads(config: Any, world: int) -> None:
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    common = math.gcd(heads, kv_heads)
    if common % world:
        fitting = [str(n) for n in range(1, common + 1) if common % n == 0]
        raise UnsupportedModel(
            f"{heads} heads over {kv_heads} of keys and values cannot be cut into {world} equal shares, "
            f"only into {' or '.join(fitting)}"
        )


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _cut_dim(kind: str) -> int:
    return 1 if kind == "rowwise" else 0


def _share(layer: Any, kind: str, rank: int, world: int) -> nn.Module:
    dim = _cut_dim(kind)
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
