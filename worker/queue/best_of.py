"""`best_of`: more answers are computed than are given; the likeliest are said, all at once, at the end."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from headrace.errors import HeadraceError
from headrace.messages import Delta, End, Event, Finish
from worker.engine.outputs import TokenOutput
from worker.queue.job import ChoiceState, RunningJob


class BestOfJob(RunningJob):
    """Keeps silent until every candidate is complete. If it is taken over it starts again: its log is empty.

    The likeliest is the one with the highest mean log-probability a token, as in OpenAI's completions.
    """

    _scores: defaultdict[int, float]

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self._scores = defaultdict(float)

    def _add(self, event: Event) -> None:
        if isinstance(event, End):
            super()._add(event)

    def _add_delta(self, choice: ChoiceState, output: TokenOutput, text: str) -> None:
        super()._add_delta(choice, output, text)
        if output.scored is not None:
            self._scores[choice.index] += output.scored.logprob

    def _end(
        self,
        status: Literal["done", "failed", "cancelled"],
        error: HeadraceError | None,
        undecodable: bool = False,
    ) -> None:
        if not self.ended:
            ranked = sorted(self.choices, key=self._mean_logprob, reverse=True)
            self.choices = ranked[: self.job.params.n] if status == "done" else []
            for index, choice in enumerate(self.choices):
                self._say_whole(index, choice)
        super()._end(status, error, undecodable)

    def _mean_logprob(self, choice: ChoiceState) -> float:
        return self._scores[choice.index] / max(len(choice.ids), 1)

    def _say_whole(self, index: int, choice: ChoiceState) -> None:
        choice.index = index
        logprobs = choice.logprobs if self.job.params.logprobs is not None else None
        delta = Delta(
            seq=self._next_seq,
            i=index,
            text="".join(choice.text),
            ids=choice.ids,
            lp=logprobs,
            cached=self.cached_tokens if index == 0 else 0,
            prompt_lp=self._prompt_logprobs if index == 0 else None,
        )
        super()._add(delta)
        reason = choice.finish_reason or "length"
        super()._add(Finish(seq=self._next_seq, i=index, reason=reason, stop=choice.stop))
