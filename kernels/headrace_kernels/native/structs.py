"""The C++ side's plain structs, field by field. Pointers are addresses that the caller keeps alive."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_void_p


class Weight(Structure):
    """matmul/product.h"""

    _fields_ = (
        ("storage", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("int8_activations", c_int32),
        ("panels", c_void_p),
        ("bias", c_void_p),
    )


class AttentionShape(Structure):
    """paged_attention/attention.h"""

    _fields_ = (
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("k_dim", c_int32),
        ("v_dim", c_int32),
        ("block_size", c_int32),
    )


class KvCache(Structure):
    """paged_attention/attention.h"""

    _fields_ = (
        ("type", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
    )


class AttentionOptions(Structure):
    """paged_attention/attention.h"""

    _fields_ = (("scale", c_float), ("softcap", c_float), ("window", c_int32), ("sinks", c_void_p))


class Sequences(Structure):
    """paged_attention/attention.h"""

    _fields_ = (
        ("count", c_int32),
        ("cu", c_void_p),
        ("starts", c_void_p),
        ("tables", c_void_p),
        ("table_starts", c_void_p),
    )


class RotaryOptions(Structure):
    """rotary_kv/rotary.h"""

    _fields_ = (
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("dims", c_int32),
        ("interleaved", c_int32),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("epsilon", c_float),
    )


class Layer(Structure):
    """decoder_step/decoder.h"""

    _fields_ = (
        ("qkv", Weight),
        ("output", Weight),
        ("gate_up", Weight),
        ("down", Weight),
        ("attention_norm", c_void_p),
        ("attention_post_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_post_norm", c_void_p),
        ("rotary", RotaryOptions),
        ("attention", AttentionOptions),
        ("cache", KvCache),
    )


class Decoder(Structure):
    """decoder_step/decoder.h"""

    _fields_ = (
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("layer_count", c_int32),
        ("activation", c_int32),
        ("epsilon", c_float),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("logit_scale", c_float),
        ("logit_softcap", c_float),
        ("shape", AttentionShape),
        ("layers", POINTER(Layer)),
        ("embedding", POINTER(Weight)),
        ("head", POINTER(Weight)),
        ("final_norm", c_void_p),
    )


class Step(Structure):
    """decoder_step/decoder.h"""

    _fields_ = (
        ("tokens", c_int32),
        ("row_count", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("sequences", Sequences),
        ("rows", c_void_p),
        ("logits", c_void_p),
        ("nanoseconds", c_void_p),
    )
