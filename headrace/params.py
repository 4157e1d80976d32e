"""The sampling parameters: one table of names, ranges and flat spellings, for every way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace import fields as f
from headrace.messages import SamplingParams

MAX_TOKENS = 1_000_000
MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 1024
HIGHEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Rule:
    check: f.Check  # of the value as JSON gives it
    flat: Callable[[str, bytes], Any]  # of the bytes of a flat field, to that value


RULES: Mapping[str, Rule] = {
    "max_tokens": Rule(f.integer(1, MAX_TOKENS), f.flat_integer),
    "min_tokens": Rule(f.integer(0, MAX_TOKENS), f.flat_integer),
    "temperature": Rule(f.number(0, 100), f.flat_number),
    "top_p": Rule(f.number(0, 1), f.flat_number),
    "top_k": Rule(f.integer(-1, HIGHEST_ID), f.flat_integer),
    "min_p": Rule(f.number(0, 1), f.flat_number),
    "seed": Rule(f.integer(-(2**63), 2**63 - 1), f.flat_integer),
    "n": Rule(f.integer(1, MAX_N), f.flat_integer),
    "best_of": Rule(f.integer(1, MAX_N), f.flat_integer),
    "stop": Rule(f.strings(MAX_STOPS, MAX_STOP_LENGTH), f.flat_strings),
    "stop_token_ids": Rule(f.integers(1024, 0, HIGHEST_ID), f.flat_json),
    "include_stop": Rule(f.boolean, f.flat_boolean),
    "bad_words": Rule(f.strings(MAX_BAD_WORDS, MAX_STOP_LENGTH), f.flat_strings),
    "logprobs": Rule(f.integer(0, MAX_TOP_LOGPROBS), f.flat_integer),
    "prompt_logprobs": Rule(f.integer(0, MAX_TOP_LOGPROBS), f.flat_integer),
    "echo": Rule(f.boolean, f.flat_boolean),
    "presence_penalty": Rule(f.number(-2, 2), f.flat_number),
    "frequency_penalty": Rule(f.number(-2, 2), f.flat_number),
    "repetition_penalty": Rule(f.number(0.01, 10), f.flat_number),
    "logit_bias": Rule(f.biases(-1e9, 1e9, HIGHEST_ID), f.flat_json),
    "ignore_eos": Rule(f.boolean, f.flat_boolean),
    "skip_special_tokens": Rule(f.boolean, f.flat_boolean),
}


def parse_params(values: Mapping[str, Any]) -> SamplingParams:
    """Of values as JSON gives them; None is absent, other names are ignored. Raises HeadraceError."""
    checked = {
        name: rule.check(name, values[name]) for name, rule in RULES.items() if values.get(name) is not None
    }
    params = SamplingParams(**checked)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        f.refuse("min_tokens", "no more than max_tokens", params.min_tokens)
    if params.best_of is not None and params.best_of < params.n:
        f.refuse("best_of", "no less than n", params.best_of)
    return params


def flat_params(params: SamplingParams) -> dict[str, bytes | str | int | float]:
    """The flat fields that say `params`, defaults left out."""
    flat: dict[str, bytes | str | int | float] = {}
    for name in RULES:
        value = getattr(params, name)
        if value is None or value == getattr(_DEFAULTS, name):
            continue
        if isinstance(value, bool):
            flat[name] = "true" if value else "false"
        elif isinstance(value, int | float):
            flat[name] = value if isinstance(value, int) else repr(value)
        else:
            flat[name] = msgspec.json.encode(value)
    return flat


_DEFAULTS = SamplingParams()
