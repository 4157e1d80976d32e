"""What a request does to its row of logits before anything is drawn: biases, penalties, bans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from headrace.errors import HeadraceError
from worker.engine.plan import SamplePlan

BAN_BIAS = -100.0  # a bias of this or less bans the token outright


class BadWords:
    """Token sequences that must not be completed, as given by the tokenizer."""

    def __init__(self, encode: Callable[[str], Sequence[Sequence[int]]] | None) -> None:
        self._encode = encode and lru_cache(1024)(lambda word: tuple(map(tuple, encode(word))))

    def banned(self, words: Sequence[str], output_ids: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word after `output_ids`; HeadraceError without a tokenizer."""
        if self._encode is None:
            raise HeadraceError("invalid_request", "This worker has no tokenizer for bad words.", "bad_words")
        sequences = [ids for word in words for ids in self._encode(word) if ids]
        return [ids[-1] for ids in sequences if _ends_with(output_ids, ids[:-1])]


def needs_adjusting(plan: SamplePlan) -> bool:
    p = plan.params
    return bool(
        plan.ban_stop_tokens
        or p.logit_bias
        or p.bad_words
        or p.presence_penalty
        or p.frequency_penalty
        or p.repetition_penalty != 1.0
    )


def adjust(row: Tensor, plan: SamplePlan, eos_ids: Sequence[int], bad_words: BadWords) -> None:
    """Change `row` [vocab] in place. Raises HeadraceError where no token is left."""
    params = plan.params
    if params.logit_bias:
        _add_bias(row, plan)
    if params.repetition_penalty != 1.0:
        _penalise_repetition(row, plan)
    if (params.presence_penalty or params.frequency_penalty) and plan.output_ids:
        _penalise_output(row, plan)
    if params.bad_words:
        _ban(row, bad_words.banned(params.bad_words, plan.output_ids))
    if plan.ban_stop_tokens:
        _ban(row, [*eos_ids, *params.stop_token_ids])
    if float(row.max()) == -torch.inf:
        field = "logit_bias" if params.logit_bias else "bad_words" if params.bad_words else "min_tokens"
        raise HeadraceError("invalid_request", f"{field} leaves no token to choose.", field)


def _add_bias(row: Tensor, plan: SamplePlan) -> None:
    bias = {token: value for token, value in plan.params.logit_bias.items() if 0 <= token < len(row)}
    ids = torch.tensor(list(bias), dtype=torch.long, device=row.device)
    values = torch.tensor(list(bias.values()), dtype=row.dtype, device=row.device)
    row[ids] += values.masked_fill(values <= BAN_BIAS, -torch.inf)


def _penalise_repetition(row: Tensor, plan: SamplePlan) -> None:
    seen = _counted([*plan.prompt_ids, *plan.output_ids], row)[0]
    logits, penalty = row[seen], plan.params.repetition_penalty
    row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)


def _penalise_output(row: Tensor, plan: SamplePlan) -> None:
    ids, counts = _counted(plan.output_ids, row)
    row[ids] -= counts * plan.params.frequency_penalty + plan.params.presence_penalty


def _counted(token_ids: Sequence[int], row: Tensor) -> tuple[Tensor, Tensor]:
    """The different ids of a sequence that the row has, and how often each occurs."""
    ids, counts = np.unique(np.asarray(token_ids, np.int64), return_counts=True)
    inside = (ids >= 0) & (ids < len(row))
    return (
        torch.from_numpy(ids[inside]).to(row.device),
        torch.from_numpy(counts[inside]).to(row.device, row.dtype),
    )


def _ban(row: Tensor, token_ids: Sequence[int]) -> None:
    ids = [t for t in token_ids if 0 <= t < len(row)]
    if ids:
        row[torch.tensor(ids, device=row.device)] = -torch.inf


def _ends_with(token_ids: Sequence[int], end: Sequence[int]) -> bool:
    return not end or tuple(token_ids[-len(end) :]) == tuple(end)
