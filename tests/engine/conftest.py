"""A runner that computes nothing but remembers: its "model" reads every token back from the blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest

from headrace.messages import SamplingParams
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.outputs import FailedOutput, FinishedOutput, Output, TokenOutput
from worker.engine.plan import ScoredToken, SequencePlan, StepPlan, StepResult
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler

VOCAB = 50
EOS = 7
Draw = Callable[[Sequence[int], int, int, int, bool], int]


def next_token(tokens: Sequence[int], seed: int, choice: int, position: int, banned: bool) -> int:
    """The model and its sampler: a function of all tokens so far and of (seed, choice, position)."""
    token = crc32(repr((list(tokens), seed, choice, position)).encode()) % VOCAB
    return VOCAB - 1 if banned and token == EOS else token


def repeating_token(tokens: Sequence[int], seed: int, choice: int, position: int, banned: bool) -> int:
    """A model that says again what it has said, for a while: some guesses at it are right, others not."""
    token = crc32(repr((tokens[-1] % 3, seed, choice, position // 13)).encode()) % VOCAB
    return VOCAB - 1 if banned and token == EOS else token


class BlockRunner:
    """KV blocks hold token ids; a wrong, stale or shared-and-overwritten block changes what is drawn."""

    def __init__(self, num_blocks: int, block_size: int, draw: Draw = next_token) -> None:
        self.block_size = block_size
        self.draw = draw
        self.cells: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.plans: list[StepPlan] = []
        self.forgotten: list[int] = []
        self.strict = True  # plans run as soon as they are made
        self.eager = True  # launched ones, too; else not before somebody waits for them
        self.progress: dict[int, int] = {}
        self.queue: deque[Callable[[], None]] = deque()
        self.waiting = 0  # launched and not computed
        self.last: dict[int, int] = {}  # drawn by the step before

    def launch(self, plan: StepPlan) -> Queued:
        step = Queued(self, plan)
        self.waiting += 1
        self.queue.append(step.compute)
        if self.eager:
            self.catch_up()
        return step

    def catch_up(self, step: Queued | None = None) -> None:
        while self.queue and not (step and step.done):
            self.queue.popleft()()

    def run(self, plan: StepPlan) -> StepResult:
        assert not self.waiting, "the device is not at rest"
        self.catch_up()
        assert not any(part.pending for part in plan.sequences)
        return self.compute(plan)

    def compute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        plan = replace(plan, sequences=tuple(self._filled(part) for part in plan.sequences))
        for source, destination in plan.block_copies:
            self.cells[destination] = list(self.cells[source])
        for part in plan.sequences:
            self._write(part)
        drawn = {p.seq_id: self._draw(p) for p in plan.sequences if p.sample is not None}
        scores = {p.seq_id: _score(p) for p in plan.sequences if p.prompt_logprobs is not None}
        for part in plan.sequences:
            self._follow(part, len(drawn.get(part.seq_id, ())) - 1)
        sampled = {seq_id: tokens[0] for seq_id, tokens in drawn.items()}
        self.last = {seq_id: token.token_id for seq_id, token in sampled.items()}
        return StepResult(sampled, {}, scores, {i: t[1:] for i, t in drawn.items() if len(t) > 1})

    def forget(self, seq_id: int) -> None:
        self.forgotten.append(seq_id)
        self.queue.append(lambda: self._forget(seq_id))
        if not self.waiting:
            self.catch_up()

    def _forget(self, seq_id: int) -> None:
        self.progress.pop(seq_id, None)

    def _filled(self, part: SequencePlan) -> SequencePlan:
        return replace(part, token_ids=[self.last[part.seq_id]]) if part.pending else part

    def _follow(self, part: SequencePlan, right: int) -> None:
        """A runner may keep state of a sequence: chunks follow one another until it is told to forget."""
        if self.strict:
            assert part.start == self.progress.get(part.seq_id, part.start), "a chunk starts elsewhere"
            self.progress[part.seq_id] = part.start + len(part.token_ids) - part.num_guesses + max(right, 0)

    def read(self, part: SequencePlan, behind: int = 0) -> list[int]:
        count = part.start + len(part.token_ids) - part.num_guesses + behind
        cells = [
            self.cells[part.block_table[p // self.block_size]][p % self.block_size] for p in range(count)
        ]
        assert None not in cells, "a position is read that was never computed"
        return [cell for cell in cells if cell is not None]

    def _write(self, part: SequencePlan) -> None:
        assert part.token_ids, "an empty chunk"
        for offset, token in enumerate(part.token_ids):
            block, cell = divmod(part.start + offset, self.block_size)
            self.cells[part.block_table[block]][cell] = token

    def _draw(self, part: SequencePlan) -> tuple[ScoredToken, ...]:
        """The token behind the last one, and behind each guess that is right."""
        assert part.sample is not None
        known = [*part.sample.prompt_ids, *part.sample.output_ids]
        read = self.read(part)
        assert part.sample.position == len(read) - len(part.sample.prompt_ids)
        assert read[: len(known)] == known[: len(read)]
        assert part.pending or len(read) <= len(known)
        drawn: list[ScoredToken] = []
        for n, guess in enumerate([*part.token_ids[len(part.token_ids) - part.num_guesses :], None]):
            sample = part.sample.behind(n)
            seen = self.read(part, n)
            token = self.draw(seen, sample.seed, sample.choice, sample.position, sample.ban_stop_tokens)
            drawn.append(ScoredToken(token, -0.5))
            if token != guess:
                break
        return tuple(drawn)


class Queued:
    """A launched step."""

    def __init__(self, runner: BlockRunner, plan: StepPlan) -> None:
        self.runner = runner
        self.plan = plan
        self.outcome: StepResult | Exception | None = None

    @property
    def done(self) -> bool:
        return self.outcome is not None

    def compute(self) -> None:
        self.runner.waiting -= 1
        try:
            self.outcome = self.runner.compute(self.plan)
        except Exception as error:
            self.outcome = error

    def result(self) -> StepResult:
        self.runner.catch_up(self)
        assert self.outcome is not None
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def _score(part: SequencePlan) -> tuple[ScoredToken, ...]:
    following = [] if part.next_prompt_id is None else [part.next_prompt_id]
    return tuple(ScoredToken(token, -1.0) for token in [*part.token_ids[1:], *following])


class QuickRunner:
    """Draws the same token for all: when only the scheduling counts."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult({p.seq_id: ScoredToken(1, 0.0) for p in plan.sequences if p.sample})

    def forget(self, seq_id: int) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """An engine with its runner and clock, and what came out of it."""

    def __init__(self, runner: BlockRunner | None = None, draw: Draw = next_token, **config: Any) -> None:
        settings = EngineConfig(
            **{"num_blocks": 64, "block_size": 4, "max_model_len": 256, "max_num_seqs": 8, **config}
        )
        self.clock = Clock()
        self.scheduler = Scheduler(settings)
        self.runner = runner or BlockRunner(settings.num_blocks, settings.block_size, draw)
        self.engine = Engine(self.scheduler, self.runner, self.clock)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finish: dict[tuple[str, int], str] = {}
        self.errors: dict[str, str] = {}
        self.first: dict[str, TokenOutput] = {}
        self.finished: list[FinishedOutput] = []
        self.order: list[str] = []  # requests in the order of their first token

    def add(
        self, request_id: str, prompt: int | Iterable[int] = 10, max_tokens: int | None = 8, **kw: Any
    ) -> None:
        self.engine.add(make_request(request_id, prompt, max_tokens, arrival_s=self.clock.now, **kw))

    def step(self, check: bool = True) -> list[Output]:
        outputs = self.engine.step()
        for output in outputs:
            self._take(output)
        if check:
            self.scheduler.check_integrity()
        self.clock.now += 0.01
        return outputs

    def drain(self, max_steps: int = 5000) -> int:
        """Step until nothing is left. Returns the number of steps."""
        for count in range(max_steps):
            if not self.engine.has_work:
                assert self.scheduler.pool.num_used == 0
                return count
            self.step(check=count % 7 == 0)
        raise AssertionError(f"still working after {max_steps} steps: {self.engine.stats()}")

    def _take(self, output: Output) -> None:
        if isinstance(output, FailedOutput):
            assert output.request_id not in self.errors, "failed twice"
            self.errors[output.request_id] = output.error.code
            return
        where = (output.request_id, output.choice)
        assert where not in self.finish, f"{where} goes on after its end"
        if output.finish is not None:
            self.finish[where] = output.finish
        if isinstance(output, FinishedOutput):
            self.finished.append(output)
            return
        if output.request_id not in self.first:
            self.first[output.request_id] = output
            self.order.append(output.request_id)
        self.tokens.setdefault(where, []).append(output.token_id)


def make_request(
    request_id: str,
    prompt: int | Iterable[int] = 10,
    max_tokens: int | None = 8,
    *,
    seed: int | None = None,
    priority: int = 1,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    salt: str = "default",
    adapter: str = "",
    resumed: list[list[int]] | None = None,
    finished: frozenset[int] = frozenset(),
    eos: frozenset[int] = frozenset({EOS}),
    **params: Any,
) -> Request:
    """A prompt given as a length is made of the id's checksum, so that no two ids share a prefix."""
    salted = crc32(request_id.encode())
    ids = [(salted >> (i % 24)) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    number = salted % 1000 if seed is None else seed
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(
        request_id,
        ids,
        sampling,
        number,
        priority,
        arrival_s,
        deadline_s,
        salt,
        resumed or [],
        finished,
        eos,
        adapter,
    )


def expected(request: Request, choice: int = 0, room: int = 10**6, draw: Draw = next_token) -> list[int]:
    """What an undisturbed run gives, computed without an engine."""
    params, out = request.params, []  # type: ignore[var-annotated]
    most = min(room, params.max_tokens if params.max_tokens is not None else room)
    while len(out) < most:
        banned = len(out) < params.min_tokens
        token = draw([*request.prompt_ids, *out], request.seed, choice, len(out), banned)
        out.append(token)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else request.eos_ids)
        if token in stops and len(out) > params.min_tokens:
            break
    return out


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench


@pytest.fixture
def repeating() -> Draw:
    return repeating_token


@pytest.fixture
def quick_runner() -> QuickRunner:
    return QuickRunner()


@pytest.fixture
def request_of() -> Callable[..., Request]:
    return make_request


@pytest.fixture
def solo() -> Callable[..., list[int]]:
    return expected
