"""The fixed workload for comparing servers of the demo model: 64 requests of forced lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

WORKLOAD = Path(__file__).with_name("workload.json")


@dataclass(frozen=True, slots=True)
class Request:
    """One job to submit: what it asks for, its exact output length, and when it arrives."""

    fields: Mapping[str, str | int]
    output_tokens: int
    arrive_s: float = 0.0
    job_class: str = "normal"

    def entry(self, job_id: str) -> dict[Any, Any]:
        """The fields of its queue entry."""
        return {**self.fields, "id": job_id}


def forced(source: Mapping[str, str | int], output_tokens: int, arrive_s: float = 0.0) -> Request:
    """A greedy request that generates exactly `output_tokens`, whatever the model would like to say."""
    fields = {**source, "max_tokens": output_tokens, "ignore_eos": 1, "temperature": 0}
    return Request(fields, output_tokens, arrive_s)


def _read() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(WORKLOAD.read_text(encoding="utf-8"))
    return content


def _request(entry: Mapping[str, Any]) -> Request:
    # As text, which any model reads; the demo model makes of it the `prompt_ids` that peers are given.
    return forced({"prompt": entry["prompt"]}, entry["output_len"])


def peers_workload(rate_per_s: float | None = None) -> list[Request]:
    """The 64 requests, all at once, or as a Poisson process of `rate_per_s`."""
    content = _read()
    requests = [_request(entry) for entry in content["requests"]]
    if rate_per_s is None:
        return requests
    arrivals = accumulate(gap / rate_per_s for gap in content["unit_gaps"])
    return [replace(r, arrive_s=at) for r, at in zip(requests, arrivals, strict=True)]


def single_request() -> Request:
    """One request alone: 32 tokens in, 128 out."""
    return _request(_read()["single"])


def warm_up() -> Sequence[Request]:
    """A few short requests, readable by any model, that touch every code path before the clock runs."""
    return [forced({"prompt": entry["prompt"]}, 4) for entry in _read()["requests"][:4]]
