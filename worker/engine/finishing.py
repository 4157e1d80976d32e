"""When a choice is complete. Stop strings are worker/text's matter: it finds them and aborts the choice."""

from __future__ import annotations

from worker.engine.outputs import Finish
from worker.engine.request import Sequence


def bans_stop_tokens(seq: Sequence) -> bool:
    """Whether the next token must not be a stop token, because min_tokens is not reached."""
    return len(seq.output_ids) < seq.group.request.params.min_tokens


def finish_of(seq: Sequence) -> tuple[Finish | None, int | None]:
    """Why the choice is complete after its last token, and which of stop_token_ids ended it."""
    request, count = seq.group.request, len(seq.output_ids)
    if count and count > request.params.min_tokens:
        last = seq.output_ids[-1]
        if last in request.params.stop_token_ids:
            return "stop", last
        if last in request.eos_ids and not request.params.ignore_eos:
            return "stop", None
    return ("length", None) if count >= seq.max_tokens else (None, None)
