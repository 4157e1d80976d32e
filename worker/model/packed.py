"""A whole step through an unmodified transformers decoder: all sequences packed into one row of tokens."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from worker.model.attention import NAME, AttentionContext, discover_layers, install, use_implementation
from worker.model.inputs import StepInputs
from worker.model.kv import KVCache, LayerShape
from worker.model.rope import make_rope_per_token


class PackedModel:
    """Runs `model` over KV blocks through the attention interface; UnsupportedModel where it cannot."""

    way = "packed"

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.context: AttentionContext = install(model)
        use_implementation(model, NAME)
        make_rope_per_token(model)
        self._selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        discover_layers(model, self.context, device)

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return tuple(self.context.shapes)

    def logits(self, inputs: StepInputs, kv: KVCache, rows: Tensor) -> Tensor:
        """Write this step's keys and values; the logits [R, vocab] fp32 of the packed tokens `rows` [R]."""
        kv.clear_blocks(inputs.fresh_blocks)
        self.context.begin(kv, inputs)
        try:
            selected = {"logits_to_keep": rows} if self._selects_rows else {}
            out = self.model(
                input_ids=inputs.token_ids, position_ids=inputs.positions, use_cache=False, **selected
            ).logits[0]
        finally:
            self.context.end()
        return (out if self._selects_rows else out[rows]).float()
