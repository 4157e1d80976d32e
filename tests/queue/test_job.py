"""Outputs to events, and the same events again after any takeover."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from headrace.errors import HeadraceError
from headrace.messages import Delta, End, Event, Finish, Job, SamplingParams
from worker.engine.outputs import FailedOutput, FinishedOutput, TokenOutput
from worker.engine.plan import ScoredToken
from worker.queue.best_of import BestOfJob
from worker.queue.job import ChoiceState, RunningJob
from worker.queue.recovery import rebuild


@dataclass
class Piece:
    text: str
    finished: bool = False
    stop: str | None = None


class Letters:
    """Token id n is the n-th letter; "c" is held back, for "cd" is a stop string."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> Piece:
        letter = chr(ord("a") + token_id)
        if self.held and letter == "d":
            self.held = ""
            return Piece("", True, "cd")
        text, self.held = self.held + letter, ""
        if text.endswith("c"):
            text, self.held = text[:-1], "c"
        return Piece(text)

    def finish(self) -> str:
        text, self.held = self.held, ""
        return text


class Codec:
    def decode(self, ids) -> str:
        return "".join(chr(ord("a") + i) for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([ord("a") + token_id])


def make(
    params: SamplingParams | None = None,
    last_seq: int = 0,
    choices: list[ChoiceState] | None = None,
    kind: type[RunningJob] = RunningJob,
    **more,
) -> RunningJob:
    params = params or SamplingParams(n=1, logprobs=1)
    job = Job(id="j", pool="p", job_class="normal", entry_id="1-1", prompt="x", params=params)
    return kind(
        job,
        epoch=1,
        last_seq=last_seq,
        codec=Codec(),
        prompt_ids=[7, 8],
        choices=choices or [ChoiceState(i, Letters()) for i in range(params.n)],
        seed=5,
        fingerprint="f",
        model_name="m",
        **more,
    )


def token(token_id: int, choice: int = 0, finish=None, stop_token=None) -> TokenOutput:
    scored = ScoredToken(token_id, float("-inf"), ((token_id, -0.5),))
    return TokenOutput("j", choice, token_id, scored, finish, stop_token, 16, None, 0)


def events_of(running: RunningJob) -> list[Event]:
    item = running.take()
    return list(item.events) if item else []


def test_echo_puts_the_prompt_before_each_choice_and_meta_comes_back():
    params = SamplingParams(n=2, echo=True)
    running = make(params)
    for choice in (0, 1):
        running.absorb(token(0, choice))
        running.absorb(token(1, choice, finish="length"))
    final = running.take().final
    assert [c.text for c in final.result.choices] == ["xab", "xab"]


def test_last_token_finish_and_end_are_one_item():
    running = make()
    running.absorb(token(0))
    assert [type(e) for e in events_of(running)] == [Delta]
    running.absorb(token(1, finish="length"))
    item = running.take()
    assert [type(e) for e in item.events] == [Delta, Finish, End]
    assert [e.seq for e in item.events] == [2, 3, 4]
    assert item.final.status == "done"
    assert item.final.usage.completion_tokens == 2
    assert item.final.usage.cached_tokens == 16
    choice = item.final.result.choices[0]
    assert (choice.text, choice.ids, choice.finish_reason) == ("ab", [0, 1], "length")
    assert len(choice.lp) == 2


def test_minus_infinity_is_a_number_on_the_wire():
    running = make()
    running.absorb(token(0))
    assert events_of(running)[0].lp[0].lp == -9999.0


def test_stop_string_ends_the_choice_and_what_comes_later_is_dropped():
    running = make()
    assert running.absorb(token(2)) == []
    assert events_of(running)[0].text == ""  # held back, but its id is in the log
    assert running.absorb(token(3)) == [0]
    assert running.absorb(token(4)) == []
    events = events_of(running)
    assert [type(e) for e in events] == [Delta, Finish, End]
    assert (events[0].text, events[0].ids, events[1].stop) == ("", [3], "cd")


def test_held_text_is_flushed_when_the_engine_ends_the_choice():
    running = make()
    running.absorb(token(2, finish="length"))
    assert events_of(running)[0].text == "c"


def test_the_stop_token_itself_is_no_text():
    running = make()
    running.absorb(token(2))
    running.absorb(token(0, finish="stop", stop_token=0))
    events = [e for e in events_of(running) if isinstance(e, Delta)]
    assert [e.text for e in events] == ["", "c"]
    assert [e.ids for e in events] == [[2], [0]]


def test_end_waits_for_every_choice():
    running = make(SamplingParams(n=2))
    running.absorb(token(0, 0, finish="stop"))
    assert not running.ended
    running.absorb(FinishedOutput("j", 1, "length"))
    assert running.ended
    assert [e.i for e in events_of(running) if isinstance(e, Finish)] == [0, 1]


def test_failure_and_cancel_keep_what_was_said_and_nothing_follows():
    for end in (lambda r: r.cancel(), lambda r: r.absorb(FailedOutput("j", HeadraceError("non_finite")))):
        running = make()
        running.absorb(token(0))
        running.absorb(token(2))
        end(running)
        running.absorb(token(1))
        running.cancel()
        item = running.take()
        assert [e.text for e in item.events if isinstance(e, Delta)] == ["a", "", "c"]
        assert isinstance(item.events[-1], End)
        assert item.final.result.choices[0].ids == [0, 2]
        assert item.final.result.choices[0].text == "ac"
        assert running.take() is None


def test_best_of_says_the_likeliest_at_the_end_and_nothing_before():
    params = SamplingParams(n=1, best_of=2)
    running = make(params, choices=[ChoiceState(i, Letters()) for i in range(2)], kind=BestOfJob)

    def scored(token_id: int, choice: int, logprob: float, finish=None) -> TokenOutput:
        return TokenOutput("j", choice, token_id, ScoredToken(token_id, logprob), finish, None, 0, None, 0)

    for choice, logprob in ((0, -2.0), (1, -1.0)):
        running.absorb(scored(choice, choice, logprob))
        assert running.take() is None
        running.absorb(scored(choice, choice, logprob, "length"))
    item = running.take()
    assert [type(e) for e in item.events] == [Delta, Finish, End]
    assert (item.events[0].i, item.events[0].text, item.events[0].ids) == (0, "bb", [1, 1])
    assert [e.seq for e in item.events] == [1, 2, 3]
    assert item.final.usage.completion_tokens == 2


STORY = [
    token(0, 0),
    token(2, 1),
    token(2, 0),
    token(3, 1),
    token(1, 0),
    token(2, 0, finish="length"),
]


def test_the_order_of_events_does_not_depend_on_the_schedule():
    def log(story: list[TokenOutput]) -> list[Event]:
        return [event for step in tell(make(SamplingParams(n=2)), story) for event in step]

    one_after_the_other = sorted(STORY, key=lambda o: -o.choice)
    assert log(one_after_the_other) == log(STORY)
    assert [e.i for e in log(STORY) if isinstance(e, Delta)] == [0, 1, 0, 1, 0, 0]


def tell(running: RunningJob, story: list[TokenOutput]) -> list[list[Event]]:
    steps = []
    for output in story:
        running.absorb(output)
        steps.append(events_of(running))
    return steps


@pytest.mark.parametrize("taken_over_after", range(len(STORY)))
def test_a_job_taken_over_goes_on_with_the_very_same_events(taken_over_after: int):
    params = SamplingParams(n=2, logprobs=1)
    undisturbed = tell(make(params), STORY)
    log = [event for step in undisturbed[:taken_over_after] for event in step]
    state = rebuild(log, 2, Letters)
    again = make(
        params,
        last_seq=len(log),
        choices=state.choices,
        cached_tokens=state.cached_tokens,
        prompt_logprobs=state.prompt_logprobs,
    )
    assert tell(again, STORY[taken_over_after:]) == undisturbed[taken_over_after:]
    assert again._final == make_final(params)


def make_final(params: SamplingParams):
    running = make(params)
    tell(running, STORY)
    return running._final


def test_a_gap_in_the_log_is_lost_not_spliced():
    log = [Delta(seq=1, text="a", ids=[0]), Delta(seq=3, text="b", ids=[1])]
    with pytest.raises(HeadraceError) as caught:
        rebuild(log, 1, Letters)
    assert caught.value.code == "lost"
