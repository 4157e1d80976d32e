"""What every server of the comparison is asked to do, and what was seen of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec

from benchmarks.figures import Summary, summarise
from benchmarks.load import JobTimes, LoadError
from benchmarks.workload import WORKLOAD


class PeerRequest(msgspec.Struct, frozen=True):
    """One greedy request of exactly `output_tokens`, sent `arrive_s` after the start."""

    id: int
    prompt_ids: list[int]
    output_tokens: int
    arrive_s: float = 0.0


class Answer(msgspec.Struct):
    """One request as its reader saw it, in seconds since the start. `token_s`: one entry a token; over HTTP
    one an event, of which a token whose text is held back has none. `tokens`: as the server counted."""

    id: int
    submitted_s: float
    token_s: list[float]
    ended_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Mode:
    """`name` is offline (all at once), online (at `rate_per_s`) or single (one request, alone)."""

    name: str
    rate_per_s: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.rate_per_s:.2f} req/s" if self.name == "online" else self.name


class _Entry(msgspec.Struct):
    id: int
    prompt_ids: list[int]
    output_len: int

    def request(self) -> PeerRequest:
        return PeerRequest(self.id, self.prompt_ids, self.output_len)


class _Workload(msgspec.Struct):
    requests: list[_Entry]
    single: _Entry
    unit_gaps: list[float]


def requests_of(mode: Mode) -> list[PeerRequest]:
    """The requests of a mode; online they come as a Poisson process, the same one for every server."""
    content = _read()
    if mode.name == "single":
        return [content.single.request()]
    requests = [entry.request() for entry in content.requests]
    if mode.name == "offline":
        return requests
    arrivals = accumulate(gap / mode.rate_per_s for gap in content.unit_gaps)
    return [msgspec.structs.replace(r, arrive_s=at) for r, at in zip(requests, arrivals, strict=True)]


def warm_up() -> list[PeerRequest]:
    """A few short requests that touch every code path before the clock runs."""
    return [msgspec.structs.replace(r, output_tokens=4) for r in requests_of(Mode("offline"))[:4]]


def tokens_a_request() -> float:
    """Output tokens of the mean request."""
    requests = requests_of(Mode("offline"))
    return sum(request.output_tokens for request in requests) / len(requests)


def summary_of(requests: Sequence[PeerRequest], answers: Sequence[Answer]) -> Summary:
    """Raises LoadError when an answer has not the length that was asked for: its figures mean nothing."""
    by_id = {answer.id: answer for answer in answers}
    for request in requests:
        answer = by_id.get(request.id)
        if answer is None or answer.tokens != request.output_tokens or not answer.token_s:
            seen = "no answer" if answer is None else f"{answer.tokens} tokens"
            raise LoadError(f"request {request.id}: {request.output_tokens} tokens asked for, {seen}")
    jobs = [JobTimes(str(a.id), a.submitted_s, a.token_s, a.ended_s) for a in answers]
    summary = summarise(jobs)
    tokens = sum(answer.tokens for answer in answers)
    return replace(summary, output_tokens=tokens, tokens_per_s=tokens / summary.wall_s)


def decode_tokens_per_s(answer: Answer) -> float:
    """Speed of one stream from its first token to its last."""
    return (answer.tokens - 1) / (answer.token_s[-1] - answer.token_s[0])


def _read() -> _Workload:
    return msgspec.json.decode(WORKLOAD.read_bytes(), type=_Workload)
