"""Finds out what a transformers decoder computes, by watching it: which projections, norms, rotations.

A few tokens are sent through the model while its attention calls are recorded. Every part must explain the
numbers seen, and every parameter of a layer must have found its place; otherwise the model is NotFusable and
runs as transformers wrote it. Names only say where to look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace_kernels.rms_norm.reference import rms_norm
from headrace_kernels.rotary_kv.reference import rotate
from worker.model.packed import PackedModel
from worker.model.tiles import AttentionCall
from worker.model.watch import PROBE_POSITIONS, NotFusable, Seen, Watched, owners_of, watch

TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor  # effective, fp32
    epsilon: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """Of one layer. `source` makes its tables: positions [1, P] → cos, sin [1, P, dims]."""

    source: Callable[[Tensor], tuple[Tensor, Tensor]]
    key: int  # equal for layers with the same tables
    interleaved: bool


@dataclass(frozen=True, slots=True)
class LayerParts:
    qkv: Sequence[nn.Module]  # linear layers whose outputs, one after another, are queries, keys, values
    output: nn.Module
    gate_up: Sequence[nn.Module]
    down: nn.Module
    attention_norm: Norm
    mlp_norm: Norm
    attention_post_norm: Norm | None
    mlp_post_norm: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    rotation: Rotation | None
    call: AttentionCall


@dataclass(frozen=True, slots=True)
class DecoderParts:
    layers: Sequence[LayerParts]
    heads: int
    embedding: nn.Module
    embedding_scale: float
    final_norm: Norm
    head: nn.Module
    activation: str
    residual_scale: float
    logit_scale: float
    logit_softcap: float


@torch.inference_mode()
def find_structure(packed: PackedModel, vocab_size: int) -> DecoderParts:
    """Raises NotFusable."""
    model = packed.model
    ids = torch.arange(len(PROBE_POSITIONS))[None] * 7 % vocab_size
    watched = watch(packed, ids)
    if not watched.layers or watched.first_input is None:
        raise NotFusable("its attention takes no hidden states")
    owners = owners_of(model, [seen.module for seen in watched.layers])
    layers = [_layer(owner, seen, watched) for owner, seen in zip(owners, watched.layers, strict=True)]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    config: Any = model.config
    config = config.get_text_config()
    return DecoderParts(
        layers=layers,
        heads=watched.layers[0].q.shape[1],
        embedding=embedding,
        embedding_scale=_embedding_scale(embedding, ids[0], watched.first_input),
        final_norm=_final_norm(model, owners, embedding, head, watched.first_input),
        head=head,
        activation=_activation(owners[0]),
        residual_scale=float(getattr(config, "residual_multiplier", None) or 1.0),
        logit_scale=1.0 / float(getattr(config, "logits_scaling", None) or 1.0),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


def _layer(owner: nn.Module, seen: Seen, watched: Watched) -> LayerParts:
    attention = seen.module
    qkv = _children(attention, ("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
    output = _children(attention, ("o_proj",), ("dense",), ("out_proj",))[0]
    mlp = _mlp(owner)
    gate_up = _children(mlp, ("gate_proj", "up_proj"), ("gate_up_proj",))
    down = _children(mlp, ("down_proj",))[0]
    width = seen.hidden.shape[1]
    sandwich = hasattr(owner, "pre_feedforward_layernorm")
    mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    norms = [getattr(owner, name, None) for name in ("input_layernorm", mlp_norm)]
    norms += [
        getattr(owner, n, None)
        for n in ("post_attention_layernorm", "post_feedforward_layernorm")
        if sandwich
    ]
    q_norm, k_norm, rotation = _heads(seen, qkv, watched)
    used = [
        *qkv,
        output,
        *gate_up,
        down,
        *norms,
        *(getattr(attention, n, None) for n in ("q_norm", "k_norm")),
    ]
    _account(owner, [m for m in used if m is not None], extra=seen.call.sinks)
    before, after, *rest = (_norm(norm, width) for norm in norms)
    if before is None or after is None:
        raise NotFusable("a layer lacks a norm before its attention or its MLP")
    post = rest or [None, None]
    return LayerParts(
        qkv, output, gate_up, down, before, after, post[0], post[1], q_norm, k_norm, rotation, seen.call
    )


def _children(module: nn.Module, *choices: Sequence[str]) -> list[nn.Module]:
    for names in choices:
        found = [getattr(module, name, None) for name in names]
        if all(isinstance(m, nn.Module) and getattr(m, "weight", None) is not None for m in found):
            if not all(type(m) is nn.Linear for m in found):
                raise NotFusable(f"{names[0]} is a {type(found[0]).__name__}")
            return found  # type: ignore[return-value]
    raise NotFusable(f"{type(module).__name__} has no {choices[0][0]}")


def _mlp(owner: nn.Module) -> nn.Module:
    for child in owner.children():
        if hasattr(child, "down_proj") and hasattr(
            child, "act_fn" if hasattr(child, "act_fn") else "activation_fn"
        ):
            return child
    raise NotFusable("a layer has no gated MLP")


def _account(owner: nn.Module, used: Sequence[nn.Module], extra: Tensor | None) -> None:
    known = {id(p) for module in used for p in module.parameters()} | {id(extra)}
    left = [name for name, p in owner.named_parameters() if id(p) not in known]
    if left:
        raise NotFusable(f"it has parameters of unknown purpose ({left[0]})")


def _norm(module: nn.Module | None, width: int) -> Norm | None:
    """The norm's effective weight: it is an RMS norm if it does as one on random rows."""
    if module is None:
        return None
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.shape != (width,) or epsilon is None:
        raise NotFusable(f"{type(module).__name__} is no RMS norm")
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(width)) * 0.1
    seen = module(x)
    for effective in (weight.detach().float(), 1.0 + weight.detach().float()):
        if torch.allclose(seen, rms_norm(x, effective, epsilon), rtol=TOLERANCE, atol=1e-5):
            return Norm(effective.contiguous(), float(epsilon))
    raise NotFusable(f"{type(module).__name__} is no RMS norm")


def _heads(
    seen: Seen, qkv: Sequence[nn.Module], watched: Watched
) -> tuple[Norm | None, Norm | None, Rotation | None]:
    """Which norms and rotation turn the projections into the queries and keys that were seen."""
    (tokens, heads, k_dim), kv_heads = seen.q.shape, seen.k.shape[1]
    projected = torch.cat([module(seen.hidden) for module in qkv], 1)
    q, k = projected[:, : (heads + kv_heads) * k_dim].split([heads * k_dim, kv_heads * k_dim], 1)
    q, k = q.view(tokens, heads, k_dim), k.view(tokens, kv_heads, k_dim)
    q_norm, k_norm = (_head_norm(getattr(seen.module, name, None), k_dim) for name in ("q_norm", "k_norm"))
    q, k = _normed(q, q_norm), _normed(k, k_norm)
    for rotation in (None, *_rotations(seen, watched)):
        if _same(_rotated(q, rotation, seen), seen.q) and _same(_rotated(k, rotation, seen), seen.k):
            return q_norm, k_norm, rotation
    raise NotFusable("its queries are no rotation of its projections")


def _head_norm(module: nn.Module | None, k_dim: int) -> Norm | None:
    return None if module is None or isinstance(module, nn.Identity) else _norm(module, k_dim)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm(x, norm.weight, norm.epsilon)


def _rotations(seen: Seen, watched: Watched) -> Iterator[Rotation]:
    if seen.tables is None:
        return
    for key, (source, cosines) in enumerate(watched.rotaries):
        if cosines is seen.tables[0] or torch.equal(cosines, seen.tables[0]):
            yield Rotation(source, key, interleaved=False)
            yield Rotation(source, key, interleaved=True)
            return


def half_tables(cosines: Tensor, sines: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """transformers' tables [1, P, dims] hold each angle twice: in pairs if interleaved, else in halves."""
    half = cosines.shape[-1] // 2
    pick = slice(None, None, 2) if interleaved and _is_paired(cosines) else slice(half)
    return cosines[0, :, pick].float().contiguous(), sines[0, :, pick].float().contiguous()


def _is_paired(cosines: Tensor) -> bool:
    return torch.equal(cosines[..., 0::2], cosines[..., 1::2])


def _rotated(x: Tensor, rotation: Rotation | None, seen: Seen) -> Tensor:
    if rotation is None or seen.tables is None:
        return x
    cosines, sines = half_tables(*seen.tables, rotation.interleaved)
    return rotate(x, cosines, sines, interleaved=rotation.interleaved)


def _same(a: Tensor, b: Tensor) -> bool:
    scale = max(1e-3, float(b.abs().max()))
    return float((a - b).abs().max()) <= TOLERANCE * scale


def _embedding_scale(embedding: nn.Module, ids: Tensor, first_input: Tensor) -> float:
    rows = embedding.weight[ids].float()  # type: ignore[index]
    at = int(rows.abs().argmax())
    scale = float(first_input.flatten()[at] / rows.flatten()[at])
    if not torch.allclose(rows * scale, first_input, rtol=1e-4, atol=1e-6 + 1e-4 * abs(scale)):
        raise NotFusable("its first layer reads something else than its embeddings")
    return scale if abs(scale - 1.0) > 1e-6 else 1.0


def _final_norm(
    model: nn.Module, owners: Sequence[nn.Module], embedding: nn.Module, head: nn.Module, like: Tensor
) -> Norm:
    known = {id(p) for module in (*owners, embedding, head) for p in module.parameters()}
    left = [
        module for module in model.modules() for p in module.parameters(recurse=False) if id(p) not in known
    ]
    if len(left) != 1:
        raise NotFusable(f"{len(left)} parameters lie outside its layers, where one norm is expected")
    norm = _norm(left[0], like.shape[1])
    assert norm is not None
    return norm


def _activation(owner: nn.Module) -> str:
    from headrace_kernels.gated_activation.reference import ACTIVATIONS

    mlp = _mlp(owner)
    function: Any = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    x = torch.linspace(-6, 6, 97)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(function(x), known(x), atol=1e-6):
            return name
    raise NotFusable(f"its activation {type(function).__name__} is none of {', '.join(ACTIVATIONS)}")
