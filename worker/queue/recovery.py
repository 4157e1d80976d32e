"""A job taken over is rebuilt from its log: nothing that the log can tell is kept anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.messages import Delta, End, Event, Finish, TokenLogprob
from worker.queue.job import ChoiceState, TextStreamLike


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A job as its log tells it. The prompt's part stands on the first event."""

    choices: list[ChoiceState]
    cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None] | None


def rebuild(
    events: Sequence[Event], num_choices: int, new_text_stream: Callable[[], TextStreamLike]
) -> Rebuilt:
    """The state of every choice after `events`, text machine included.

    Raises HeadraceError `lost` when the log has a gap: going on from it would splice over missing tokens.
    """
    choices = [ChoiceState(index=i, text_stream=new_text_stream()) for i in range(num_choices)]
    for expected_seq, event in enumerate(events, start=1):
        if event.seq != expected_seq:
            raise HeadraceError("lost", f"Event {expected_seq} is missing from the job's log.")
        _replay(choices, event)
    for choice in choices:
        if not choice.finished:
            _go_through(choice)
    first = next((e for e in events if isinstance(e, Delta)), None)
    return Rebuilt(choices, first.cached if first else 0, first.prompt_lp if first else None)


def _go_through(choice: ChoiceState) -> None:
    for token_id in choice.ids:
        piece = choice.text_stream.push(token_id)
        if piece.finished:
            choice.ended_by = piece.stop


def _replay(choices: list[ChoiceState], event: Event) -> None:
    if isinstance(event, End):
        raise HeadraceError("internal", "The log is complete already.")
    choice = choices[event.i]
    if isinstance(event, Finish):
        choice.finish_reason, choice.stop = event.reason, event.stop
    elif isinstance(event, Delta):
        choice.ids.extend(event.ids)
        if event.text:
            choice.text.append(event.text)
        if event.lp:
            choice.logprobs.extend(event.lp)
