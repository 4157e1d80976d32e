"""The compiled library as Python sees it: every exported function with its argument types.

ctypes releases the GIL for the length of a call. Callers check shapes and types: the other side trusts them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from . import structs
from .build import build

_WEIGHT = POINTER(structs.Weight)
_SHAPE = POINTER(structs.AttentionShape)
_ROTARY = POINTER(structs.RotaryOptions)
_OPTIONS = POINTER(structs.AttentionOptions)
_CACHE = POINTER(structs.KvCache)
_SEQUENCES = POINTER(structs.Sequences)


SIGNATURES: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "hr_set_threads": (None, (c_int32,)),
    "hr_threads": (c_int32, ()),
    "hr_isa": (ctypes.c_char_p, ()),
    "hr_use_huge_pages": (None, (c_void_p, c_int64)),
    "hr_packed_bytes": (c_int64, (c_int32, c_int32, c_int32)),
    "hr_pack": (None, (c_int32, c_int32, c_int32, c_void_p, c_int64, c_void_p, c_void_p)),
    "hr_unpack": (None, (_WEIGHT, c_void_p)),
    "hr_linear": (None, (_WEIGHT, c_void_p, c_int64, c_int32, c_void_p, c_int64, c_void_p, c_int64)),
    "hr_gather_rows": (None, (_WEIGHT, c_void_p, c_int32, c_void_p)),
    "hr_paged_attention": (
        None,
        (_SHAPE, _OPTIONS, _SEQUENCES, c_void_p, c_int64, _CACHE, c_void_p, c_int64),
    ),
    "hr_rotary_kv_write": (
        None,
        (_SHAPE, _ROTARY, c_void_p, c_int32, c_void_p, c_void_p, _CACHE),
    ),
    "hr_rms_norm": (None, (c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_float, c_void_p)),
    "hr_gated_activation": (None, (c_int32, c_void_p, c_int32, c_int32, c_void_p)),
    "hr_argmax": (None, (c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p)),
    "hr_log_sum_exp": (None, (c_void_p, c_int64, c_int32, c_int32, c_void_p)),
    "hr_copy_blocks": (None, (c_void_p, c_void_p, c_int32, c_void_p, c_int32)),
    "hr_decoder_step": (c_int32, (POINTER(structs.Decoder), POINTER(structs.Step))),
}


def open_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def load(isa: str) -> ctypes.CDLL:
    """The library for one instruction set, compiled at first use. Raises BuildError."""
    return open_library(build(isa))
