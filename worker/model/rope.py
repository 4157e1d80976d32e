"""Rotary tables that look at one token's position, never at the batch.

transformers scales the frequencies of dynamic-NTK and longrope models by the longest position in the whole
input, so a long neighbour would move a short request's cosines. Here a token at position p gets the
frequencies of a sequence of p + 1 tokens: what the model itself uses when it decodes token by token. A table
so defined does not depend on chunking or neighbours, and cached prefixes stay valid; keys keep the
frequencies they were written with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TABLE_STEP = 256
Tables = tuple[Tensor, Tensor]


def make_rope_per_token(model: nn.Module) -> int:
    """Replace the forward of every rotary module that looks at the batch; returns how many there were."""
    changed = 0
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if any(k in ("dynamic", "longrope") for k in kinds):
            module.forward = PerTokenRotary(module)
            changed += 1
    return changed


class PerTokenRotary:
    """The forward of one rotary module, (x, position_ids [1, T], layer_type) → cos and sin [1, T, dim]."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.plain: Callable[..., Tables] = getattr(type(module).forward, "__wrapped__", type(module).forward)
        self._far: dict[str | None, Tables] = {}

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Tables:
        kind = self._of("rope_type", layer_type)
        near = self._with_frequencies(x, position_ids, self._original(layer_type), layer_type)
        if kind not in ("dynamic", "longrope"):
            return near
        limit = self._limit(kind, layer_type)
        far_positions = (position_ids - limit).clamp_min(0)
        last = int(far_positions.max())
        if last == 0 and not bool((position_ids >= limit).any()):
            return near
        far = self._far_tables(x, limit, last + 1, kind, layer_type)
        is_far = (position_ids >= limit)[..., None]
        cos, sin = (
            torch.where(is_far, f[far_positions].to(n.dtype), n) for f, n in zip(far, near, strict=True)
        )
        return cos, sin

    def _far_tables(self, x: Tensor, limit: int, count: int, kind: str, layer_type: str | None) -> Tables:
        """cos and sin [≥ count, dim] of positions limit, limit + 1, …; grown when first needed."""
        have = self._far.get(layer_type)
        known = 0 if have is None else len(have[0])
        if known < count:
            wanted = -(-count // TABLE_STEP) * TABLE_STEP
            rows = [self._far_row(x, limit + i, kind, layer_type) for i in range(known, wanted)]
            cos, sin = (torch.cat(column, dim=1)[0] for column in zip(*rows, strict=True))
            have = (cos, sin) if have is None else (torch.cat([have[0], cos]), torch.cat([have[1], sin]))
            self._far[layer_type] = have
        assert have is not None
        return have

    def _far_row(self, x: Tensor, position: int, kind: str, layer_type: str | None) -> Tables:
        extra = {} if layer_type is None else {"layer_type": layer_type}
        init: Callable[..., tuple[Tensor, float]] = ROPE_INIT_FUNCTIONS[kind]
        frequencies, _ = init(self.module.config, x.device, seq_len=position + 1, **extra)
        return self._with_frequencies(x, torch.tensor([[position]], device=x.device), frequencies, layer_type)

    def _with_frequencies(
        self, x: Tensor, positions: Tensor, frequencies: Tensor, layer_type: str | None
    ) -> Tables:
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        setattr(self.module, name, frequencies.to(x.device))
        extra = {} if layer_type is None else {"layer_type": layer_type}
        return self.plain(self.module, x, positions, **extra)

    def _original(self, layer_type: str | None) -> Tensor:
        name = "original_inv_freq" if layer_type is None else f"{layer_type}_original_inv_freq"
        frequencies: Tensor = getattr(self.module, name)
        return frequencies

    def _limit(self, kind: str, layer_type: str | None) -> int:
        if kind == "dynamic":
            return int(self.module.original_max_seq_len)
        parameters = self.module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        return int(parameters["original_max_position_embeddings"])

    def _of(self, name: str, layer_type: str | None) -> str:
        value = getattr(self.module, name)
        return value if layer_type is None else value[layer_type]
