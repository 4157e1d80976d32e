"""The attention function that runs any transformers decoder over packed tokens and our KV blocks.

It is registered with transformers under `NAME`. A model's attention module finds the step it takes part in
through an attribute set on it by `install`, because some models drop keyword arguments they do not know.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace_kernels import dispatch
from worker.model.checkpoint import UnsupportedModel
from worker.model.inputs import StepInputs
from worker.model.kv import KVCache, LayerShape
from worker.model.tiles import AttentionCall, TiledAttention

NAME = "headrace"
_ATTRIBUTE = "headrace_context"


class StepAttention(Protocol):
    """Attention of one step over the blocks, for all layers."""

    def attend(self, layer: int, query: Tensor, call: AttentionCall) -> Tensor:
        """query [T, heads, k_dim] → [T, heads, v_dim]"""
        ...


def begin_step(kv: KVCache, inputs: StepInputs) -> StepAttention:
    """The only place where an implementation of attention is chosen."""
    if dispatch.backend().name == "triton":
        from worker.model.triton_attention import TritonAttention

        return TritonAttention(kv, inputs)
    return TiledAttention(kv, inputs)


class AttentionContext:
    """What the attention modules of one model share: which layer each is, and the step that runs."""

    def __init__(self) -> None:
        self.layers: dict[int, int] = {}  # id(module) → layer, in the order of the first calls
        self.shapes: list[LayerShape] = []
        self.kv: KVCache | None = None
        self.inputs: StepInputs | None = None
        self.step: StepAttention | None = None

    def begin(self, kv: KVCache, inputs: StepInputs) -> None:
        self.kv, self.inputs, self.step = kv, inputs, begin_step(kv, inputs)

    def end(self) -> None:
        self.kv = self.inputs = self.step = None

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """q [1, heads, T, k_dim], k and v [1, kv_heads, T, dim] → [1, T, heads, v_dim]"""
        if self.kv is None or self.inputs is None or self.step is None:
            return self._discover(module, q, k, v)
        layer = self.layers[id(module)]
        self.kv.write(layer, self.inputs.slots, k[0].transpose(0, 1), v[0].transpose(0, 1))
        return self.step.attend(layer, q[0].transpose(0, 1).contiguous(), call)[None]

    def _discover(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Outside a step only shapes are learnt: each module that calls is a layer with keys and values."""
        if id(module) in self.layers:
            raise UnsupportedModel("one attention layer is called more than once in a pass")
        self.layers[id(module)] = len(self.shapes)
        self.shapes.append(LayerShape(k.shape[1], k.shape[3], v.shape[3]))
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, T, k_dim] → ([1, T, heads, v_dim], None)."""
    context: AttentionContext = getattr(module, _ATTRIBUTE)
    if attention_mask is not None:
        raise UnsupportedModel("it builds an attention mask of its own")
    call = AttentionCall(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    return context.attend(module, query, key, value, call), None


def install(model: nn.Module) -> AttentionContext:
    """Make every attention module of `model` call `attention_forward`, with a context of this model's own."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    context = AttentionContext()
    for module in model.modules():
        setattr(module, _ATTRIBUTE, context)
    return context


def use_implementation(model: nn.Module, name: str) -> None:
    """Choose the attention of all of a model's configurations, composite ones included."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def discover_layers(model: nn.Module, context: AttentionContext, device: torch.device) -> None:
    """One pass over a few tokens that learns the layers' shapes. Raises UnsupportedModel."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    try:
        with torch.inference_mode():
            model(input_ids=ids, position_ids=positions, use_cache=False)
    except (TypeError, AttributeError, RuntimeError, ValueError) as problem:
        first = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise UnsupportedModel(f"it does not run over the attention interface ({first})") from problem
    if not context.shapes:
        raise UnsupportedModel("none of its layers calls the attention interface")
