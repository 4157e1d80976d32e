"""`python -m worker.verify <job>`: runs a finished job again, alone, and compares tokens and logprobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from headrace.errors import HeadraceError
from headrace.messages import Choice, Result
from worker.engine.engine import Engine
from worker.engine.outputs import FailedOutput, TokenOutput
from worker.engine.request import Request
from worker.queue.job import LOWEST_LOGPROB


@dataclass(frozen=True, slots=True)
class Verdict:
    """`difference`: where the two runs part first; None when they agree bit for bit."""

    tokens: int
    logprobs: int
    difference: str | None


def verify(engine: Engine, result: Result, eos_ids: frozenset[int]) -> Verdict:
    """Runs `result`'s job on an idle engine. Raises HeadraceError when it cannot be run again."""
    outputs = _run(engine, _request(result, eos_ids))
    tokens = logprobs = 0
    for choice in result.choices:
        again = [o for o in outputs if o.choice == choice.index]
        difference = _first_difference(choice, again)
        if difference is not None:
            return Verdict(tokens, logprobs, difference)
        tokens += len(choice.ids)
        logprobs += len(choice.lp or ())
    return Verdict(tokens, logprobs, None)


def _request(result: Result, eos_ids: frozenset[int]) -> Request:
    if result.params is None or result.prompt_ids is None or result.seed is None:
        raise HeadraceError("invalid_request", "The result does not say how it was made.")
    if (result.params.best_of or result.params.n) != result.params.n:
        raise HeadraceError(
            "invalid_request", "Of a best_of job the answers not given are unknown.", "best_of"
        )
    longest = max((len(c.ids) for c in result.choices), default=0)
    return Request(
        request_id="verify",
        prompt_ids=result.prompt_ids,
        params=msgspec.structs.replace(result.params, max_tokens=longest),
        seed=result.seed,
        eos_ids=eos_ids,
    )


def _run(engine: Engine, request: Request) -> list[TokenOutput]:
    engine.add(request)
    outputs: list[TokenOutput] = []
    while engine.has_work:
        for output in engine.step():
            if isinstance(output, FailedOutput):
                raise output.error
            if isinstance(output, TokenOutput):
                outputs.append(output)
    return outputs


def _first_difference(choice: Choice, again: list[TokenOutput]) -> str | None:
    where = f"choice {choice.index}, token"
    for n, (token_id, output) in enumerate(zip(choice.ids, again, strict=False)):
        if token_id != output.token_id:
            return f"{where} {n}: {token_id} then, {output.token_id} now"
    if len(again) < len(choice.ids):
        return f"{where} {len(again)}: {choice.ids[len(again)]} then, nothing now"
    for n, (then, output) in enumerate(zip(choice.lp or (), again, strict=False)):
        now = [output.scored.logprob, *(lp for _, lp in output.scored.top)] if output.scored else []
        if list(_values(then.lp, (t.lp for t in then.top))) != list(_values(*_split(now))):
            return f"{where} {n}: log-probabilities differ"
    return None


def _split(values: list[float]) -> tuple[float, list[float]]:
    return (values[0], values[1:]) if values else (LOWEST_LOGPROB, [])


def _values(first: float, rest: Iterable[float]) -> Iterable[float]:
    return (max(value, LOWEST_LOGPROB) for value in (first, *rest))


def main() -> None:
    import os
    import sys

    from headrace.config import WorkerSettings, load_settings
    from headrace.connect import connect_sync
    from headrace.keys import Keys
    from headrace.logs import configure_logging
    from worker.build import build

    job_id = sys.argv[1]
    settings = load_settings(WorkerSettings, os.environ)
    configure_logging(settings.log_format, "warning")
    stored = connect_sync(settings.redis_url, tag=settings.pool).hget(
        Keys(settings.pool).job(job_id), "result"
    )
    if stored is None:
        sys.exit(f"error: job {job_id}: no result in pool {settings.pool}; it has not ended or has expired")
    result = msgspec.json.decode(stored, type=Result)  # type: ignore[arg-type]
    built = build(settings)
    if result.fingerprint != built.model.fingerprint:
        sys.exit(
            f"error: job {job_id} was made by fingerprint {result.fingerprint}, this worker is "
            f"{built.model.fingerprint}: the same bits are not promised between them"
        )
    try:
        verdict = verify(built.engine, result, built.model.eos_ids)
    except HeadraceError as refusal:
        sys.exit(f"error: job {job_id}: {refusal}")
    if verdict.difference is not None:
        sys.exit(f"job {job_id} differs: {verdict.difference}")
    print(f"job {job_id}: {verdict.tokens} tokens and {verdict.logprobs} log-probabilities, the same bits")


if __name__ == "__main__":
    main()
