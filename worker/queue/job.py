"""One claimed job on its way out: engine outputs become the events of its log, numbered, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from headrace.errors import HeadraceError
from headrace.messages import (
    Choice,
    Delta,
    End,
    Event,
    Finish,
    FinishReason,
    Job,
    Result,
    TokenLogprob,
    Usage,
)
from headrace.script_types import EmitItem, Final
from worker.engine.outputs import FailedOutput, FinishedOutput, Output, TokenOutput
from worker.engine.plan import ScoredToken

LOWEST_LOGPROB = -9999.0  # stands for -inf, which JSON cannot say


class TextPiece(Protocol):
    @property
    def text(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    @property
    def stop(self) -> str | None: ...


class TextStreamLike(Protocol):
    def push(self, token_id: int) -> TextPiece: ...
    def finish(self) -> str: ...


class Codec(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True)
class ChoiceState:
    """What choice `index` has said so far, and the text machine that goes on from there."""

    index: int
    text_stream: TextStreamLike
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    ended_by: str | None = None  # a stop string in the log that has no `finish` there yet

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RunningJob:
    """Owns a job's sequence numbers, choices and pending events. Lives on the event loop."""

    def __init__(
        self,
        job: Job,
        *,
        epoch: int,
        last_seq: int,
        codec: Codec,
        prompt_ids: list[int],
        choices: list[ChoiceState],
        seed: int,
        fingerprint: str,
        model_name: str,
        cached_tokens: int = 0,
        prompt_logprobs: list[TokenLogprob | None] | None = None,
    ) -> None:
        self.job = job
        self.epoch = epoch
        self.choices = choices
        self.prompt_ids = prompt_ids
        self.cached_tokens = cached_tokens
        self.cancelled = False
        self._codec = codec
        self.seed = seed
        self._fingerprint = fingerprint
        self._model_name = model_name
        self._next_seq = last_seq + 1
        self._events: list[Event] = []
        self._ahead: list[deque[TokenOutput | FinishedOutput]] = [deque() for _ in choices]
        self._final: Final | None = None
        self._prompt_logprobs = prompt_logprobs
        self._first_event_sent = last_seq > 0

    @property
    def ended(self) -> bool:
        """Whether the terminal event has been made; nothing follows it."""
        return self._final is not None

    def catch_up(self) -> None:
        """Says what the log of a job taken over lacks: ends of complete choices, and the job's own."""
        for choice in self.choices:
            if choice.ended_by is not None and not choice.finished:
                self._add_finish(choice, "stop", choice.ended_by)
        if all(c.finished for c in self.choices):
            self._end("done", None)

    def absorb(self, output: Output) -> list[int]:
        """Takes one engine output. Returns the choices that a stop string has ended.

        The log is the same whatever the schedule was: token p of every choice comes before any token p + 1,
        in the order of the choices. What a choice has computed ahead of its turn waits here.
        """
        if self.ended:
            return []
        if isinstance(output, FailedOutput):
            self.fail(output.error)
            return []
        self._ahead[output.choice].append(output)
        stopped = []
        while (choice := self._whose_turn()) is not None and self._ahead[choice.index]:
            if self._say(choice, self._ahead[choice.index].popleft()):
                stopped.append(choice.index)
        return stopped

    def _whose_turn(self) -> ChoiceState | None:
        live = (c for c in self.choices if not c.finished)
        return min(live, key=lambda c: len(c.ids), default=None)  # the first of those with fewest

    def _say(self, choice: ChoiceState, output: TokenOutput | FinishedOutput) -> bool:
        if isinstance(output, TokenOutput):
            return self._absorb_token(choice, output)
        self._close_choice(choice, output.finish, output.stop_token)
        return False

    def _absorb_token(self, choice: ChoiceState, output: TokenOutput) -> bool:
        if not self._first_event_sent:
            self._note_prompt(output)
        stop: str | int | None = output.stop_token
        text, by_text = "", False
        if output.finish != "stop" or self.job.params.include_stop:  # else: the stop token itself is not text
            piece = choice.text_stream.push(output.token_id)
            text, by_text = piece.text, piece.finished
            stop = piece.stop if by_text else stop
        reason: FinishReason | None = "stop" if by_text else output.finish
        if reason is not None and not by_text:
            text += choice.text_stream.finish()
        self._add_delta(choice, output, text)
        if reason is not None:
            self._add_finish(choice, reason, stop)
        return by_text and output.finish is None

    def _add_delta(self, choice: ChoiceState, output: TokenOutput, text: str) -> None:
        logprob = None
        if self.job.params.logprobs is not None and output.scored is not None:
            logprob = [self._token_logprob(output.scored)]
            choice.logprobs.extend(logprob)
        if self.job.params.echo and not choice.ids:
            text = self._prompt_text() + text
        choice.ids.append(output.token_id)
        if text:
            choice.text.append(text)
        first, self._first_event_sent = not self._first_event_sent, True
        self._add(
            Delta(
                seq=self._next_seq,
                i=choice.index,
                text=text,
                ids=[output.token_id],
                lp=logprob,
                cached=self.cached_tokens if first else 0,
                prompt_lp=self._prompt_logprobs if first else None,
            )
        )

    def _prompt_text(self) -> str:
        return self.job.prompt if self.job.prompt is not None else self._codec.decode(self.prompt_ids)

    def _note_prompt(self, output: TokenOutput) -> None:
        # Said once, on the first event: who takes over repeats what the log says, not its own cache.
        self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *(self._token_logprob(s) for s in output.prompt_logprobs)]

    def _close_choice(self, choice: ChoiceState, reason: FinishReason, stop: int | None) -> None:
        self._add_held_text(choice)
        self._add_finish(choice, reason, stop)

    def _add_held_text(self, choice: ChoiceState) -> None:
        if text := choice.text_stream.finish():
            choice.text.append(text)
            self._add(Delta(seq=self._next_seq, i=choice.index, text=text))

    def _add_finish(self, choice: ChoiceState, reason: FinishReason, stop: str | int | None) -> None:
        choice.finish_reason, choice.stop = reason, stop
        self._add(Finish(seq=self._next_seq, i=choice.index, reason=reason, stop=stop))
        if all(c.finished for c in self.choices):
            self._end("done", None)

    def fail(self, error: HeadraceError, *, undecodable: bool = False) -> None:
        """Ends the job as failed; what was said so far stays in its result.

        `undecodable` also keeps the raw entry, for a program that can read it.
        """
        self._end("failed", error, undecodable)

    def cancel(self) -> None:
        """Ends the job as cancelled, with the tokens so far."""
        self._end("cancelled", None)

    def _end(
        self,
        status: Literal["done", "failed", "cancelled"],
        error: HeadraceError | None,
        undecodable: bool = False,
    ) -> None:
        if self.ended:
            return
        for choice in self.choices:
            if not choice.finished:
                self._add_held_text(choice)
        usage, wire_error = self.usage(), error.to_wire() if error else None
        self._add(End(seq=self._next_seq, status=status, usage=usage, error=wire_error))
        self._final = Final(status, usage, self._result(), wire_error, undecodable)

    def usage(self) -> Usage:
        completion = sum(len(c.ids) for c in self.choices)
        return Usage(
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=completion,
            total_tokens=len(self.prompt_ids) + completion,
            cached_tokens=self.cached_tokens,
        )

    def take(self) -> EmitItem | None:
        """The events made since the last call, as one item of an `emit`; None for none."""
        if not self._events:
            return None
        events, self._events = self._events, []
        return EmitItem(
            job_id=self.job.id,
            job_class=self.job.job_class,
            entry_id=self.job.entry_id,
            epoch=self.epoch,
            events=events,
            final=self._final,
            prompt_tokens=len(self.prompt_ids),
        )

    def close_as_lost(self) -> EmitItem:
        """The end of a job whose log was found damaged: written whatever the log holds."""
        self._events = []
        self._final = None
        self.fail(HeadraceError("lost"))
        end = self._events[-1:]
        self._events = []
        return EmitItem(
            job_id=self.job.id,
            job_class=self.job.job_class,
            entry_id=self.job.entry_id,
            epoch=self.epoch,
            events=end,
            final=self._final,
            prompt_tokens=len(self.prompt_ids),
            force=True,
        )

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._next_seq += 1

    def _result(self) -> Result:
        wants_logprobs = self.job.params.logprobs is not None
        return Result(
            choices=[
                Choice(
                    index=c.index,
                    text="".join(c.text),
                    ids=c.ids,
                    finish_reason=c.finish_reason,
                    stop=c.stop,
                    lp=c.logprobs if wants_logprobs else None,
                )
                for c in self.choices
            ],
            fingerprint=self._fingerprint,
            model=self._model_name,
            seed=self.seed,
            params=self.job.params,
            prompt_ids=self.prompt_ids,
            meta=self.job.meta,
            prompt_lp=self._prompt_logprobs,
        )

    def _token_logprob(self, scored: ScoredToken) -> TokenLogprob:
        def one(token_id: int, logprob: float) -> TokenLogprob:
            value = logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
            return TokenLogprob(id=token_id, lp=value, b=list(self._codec.token_bytes(token_id)))

        chosen = one(scored.token_id, scored.logprob)
        top = [one(token_id, logprob) for token_id, logprob in scored.top]
        return TokenLogprob(id=chosen.id, lp=chosen.lp, b=chosen.b, top=top) if top else chosen
