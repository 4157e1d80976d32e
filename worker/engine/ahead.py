"""Planning a step while the one before it is computed: which sequences can take part, and which forbid it.

A sequence whose next token is being drawn computes that token in the step ahead, unseen. It can where the
device needs nothing from the host to draw it. Is one of those being drawn of another kind, nothing is planned
ahead at all: it would be served in every other step only.
"""

from __future__ import annotations

from worker.engine.drafts import may_guess
from worker.engine.request import Sequence


def allows_ahead(seq: Sequence) -> bool:
    """Whether the tokens in flight of this running sequence are drawn without the host."""
    if seq.scores is not None:
        return False
    params = seq.group.request.params
    on_device = params.logprobs is None and not params.logit_bias and may_guess(params)
    return not seq.sampling or (on_device and len(seq.output_ids) >= params.min_tokens)


def goes_on(seq: Sequence) -> bool:
    """Whether a token may follow the one that is being drawn."""
    return seq.sampling == 1 and len(seq.output_ids) + 1 < seq.max_tokens
