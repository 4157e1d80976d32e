"""From logits to tokens, each row by itself.

The order of operations for a row:

1.  Ids past the tokenizer's vocabulary are cut off. Logits that are not finite fail the row (`non_finite`).
2.  Log-probabilities that are reported are the log-softmax of these logits: the model's own distribution.
3.  `logit_bias` is added; a bias of -100 or less bans the token.
4.  Repetition penalty (tokens of prompt and output: positive logits divided, negative multiplied), then
    frequency and presence penalty (tokens of the output).
5.  Tokens that would complete one of `bad_words` are banned.
6.  Until `min_tokens` is reached every end-of-sequence and stop token is banned. A row without any token left
    fails (`invalid_request`).
7.  Greedy (temperature below 1e-5, top_k 1 or top_p 0): the largest logit, the lowest id among equals.
8.  Otherwise temperature, then top_k, top_p over what top_k left, min_p relative to the likeliest; tokens
    equal to the last one kept are kept too.
9.  One uniform number keyed by (seed, choice, position) picks from the cumulative distribution in the order
    of ids.

No operation mixes rows and none reduces a row in an order that depends on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from headrace.errors import HeadraceError
from headrace_kernels.dispatch import backend
from headrace_kernels.sampling import argmax
from worker.engine.plan import SamplePlan, ScoredToken
from worker.model.nucleus import draw
from worker.model.penalties import BAN_BIAS, BadWords, adjust, needs_adjusting
from worker.model.philox import uniform

GREEDY_TEMPERATURE = 1e-5

__all__ = ["BAN_BIAS", "Drawn", "Sampler", "is_greedy", "score_tokens"]


Drawn = ScoredToken | HeadraceError


class Sampler:
    """Draws tokens. `encode_bad_word` turns a bad word into the token sequences that spell it."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Sequence[int],
        encode_bad_word: Callable[[str], Sequence[Sequence[int]]] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        self.bad_words = BadWords(encode_bad_word)

    def sample(self, logits: Tensor, plans: Sequence[SamplePlan]) -> list[Drawn]:
        """logits [len(plans), ≥ vocab_size] fp32, left as they are. For each row a token, or why not."""
        raw = logits[:, : self.vocab_size]
        failed: dict[int, HeadraceError] = {}  # by row
        tokens: dict[int, int] = {}
        others: list[int] = []
        for i, (plan, best) in enumerate(zip(plans, largest(raw), strict=True)):
            if best < 0:
                failed[i] = HeadraceError("non_finite")
            elif is_greedy(plan) and not needs_adjusting(plan):
                tokens[i] = best  # chosen already: by the look for what is not finite
            else:
                others.append(i)
        if others:
            adjusted = self._adjust(raw, plans, others, failed)
            tokens |= self._choose(adjusted, plans, [i for i in others if i not in failed])
        drawn = failed | _score(raw, plans, tokens)
        return [drawn[i] for i in range(len(plans))]

    def begin(self, logits: Tensor, plans: Sequence[SamplePlan]) -> Tensor | None:
        """As `sample`, without waiting: ids [len(plans)] on the device, -1 where a row is not finite.

        None where that can't be, or is not worth it.
        """
        return None

    def _adjust(
        self,
        raw: Tensor,
        plans: Sequence[SamplePlan],
        among: Sequence[int],
        failed: dict[int, HeadraceError],
    ) -> Tensor:
        """Steps 3 to 6, on a copy, for those among the rows that ask for them."""
        wanted = [i for i in among if needs_adjusting(plans[i])]
        if not wanted:
            return raw
        adjusted = raw.clone()
        for i in wanted:
            try:
                adjust(adjusted[i], plans[i], self.eos_ids, self.bad_words)
            except HeadraceError as error:
                failed[i] = error
            except Exception as problem:  # one request's parameters must not fail its neighbours
                failed[i] = HeadraceError("internal", f"sampling failed: {type(problem).__name__}")
        return adjusted

    def _choose(self, logits: Tensor, plans: Sequence[SamplePlan], alive: Sequence[int]) -> dict[int, int]:
        """Token ids by row."""
        greedy = [i for i in alive if is_greedy(plans[i])]
        drawn = [i for i in alive if not is_greedy(plans[i])]
        tokens: dict[int, int] = {}
        if greedy:
            tokens.update(zip(greedy, _pick(logits, greedy).argmax(-1).tolist(), strict=True))
        if drawn:
            chosen = [plans[i] for i in drawn]
            uniforms = [uniform(p.seed, p.choice, p.position) for p in chosen]
            ids = draw(_pick(logits, drawn), [p.params for p in chosen], uniforms)
            tokens.update(zip(drawn, ids, strict=True))
        return tokens


def is_greedy(plan: SamplePlan) -> bool:
    params = plan.params
    return params.temperature < GREEDY_TEMPERATURE or params.top_k == 1 or params.top_p <= 0.0


def score_tokens(raw: Tensor, token_ids: Sequence[int], k: int) -> list[ScoredToken]:
    """Each row's token with its log-probability, and the row's k likeliest. raw [rows, vocab] fp32."""
    if not token_ids:
        return []
    logprobs = raw.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=raw.device)[:, None])[:, 0].tolist()
    if k <= 0:
        return [ScoredToken(t, lp) for t, lp in zip(token_ids, chosen, strict=True)]
    values, ids = (t.tolist() for t in logprobs.topk(min(k, logprobs.shape[1]), dim=-1))
    tops = [_best_first(i, v) for i, v in zip(ids, values, strict=True)]
    return [ScoredToken(t, lp, top) for t, lp, top in zip(token_ids, chosen, tops, strict=True)]


def _best_first(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0])))


def _score(raw: Tensor, plans: Sequence[SamplePlan], tokens: Mapping[int, int]) -> dict[int, Drawn]:
    """Tokens by row with the log-probabilities their requests ask for; 0.0 where none are asked for."""
    out: dict[int, Drawn] = {i: ScoredToken(token, 0.0) for i, token in tokens.items()}
    by_k: dict[int, list[int]] = {}
    for i in sorted(tokens):
        k = plans[i].params.logprobs
        if k is not None:
            by_k.setdefault(k, []).append(i)
    for k, members in by_k.items():
        scored = score_tokens(_pick(raw, members), [tokens[i] for i in members], k)
        out.update(zip(members, scored, strict=True))
    return out


def _pick(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """The chosen rows, in ascending order, without a copy when they are all."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def largest(logits: Tensor) -> list[int]:
    """The first of the largest of each row [rows, vocab]; -1 for a row where one is not finite."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and backend().name == "cpu":
        return argmax(logits)[0].tolist()
    ids = logits.argmax(-1)
    sums = logits.sum(-1)  # NaN and infinity survive a sum, and it is the quickest look at every value
    if not bool(sums.isfinite().all()):
        ids = ids.masked_fill(~logits.isfinite().all(-1), -1)
    return ids.tolist()
