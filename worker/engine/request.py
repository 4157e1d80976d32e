"""A request as the engine knows it, and its choices as sequences of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.messages import SamplingParams
from worker.engine.drafts import Draft
from worker.engine.plan import ScoredToken
from worker.engine.prefix import HashChain


@dataclass(slots=True)
class Request:
    """What `Engine.add` takes. Times are seconds on the engine's clock."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams  # max_tokens is resolved; None means as much as the context allows
    seed: int  # in force
    priority: int = 1  # class rank: 0 high, 1 normal, 2 low
    arrival_s: float = 0.0
    deadline_s: float | None = None
    salt: str = "default"  # the tenant: prefixes are shared only within it
    resumed: list[list[int]] = field(default_factory=list)  # per choice: tokens that are already in the log
    finished_choices: frozenset[int] = frozenset()  # complete according to the log
    eos_ids: frozenset[int] = frozenset()
    adapter: str = ""  # another domain of the prefix cache: weights that differ from the base model


@dataclass(slots=True, eq=False)
class Group:
    """The live choices of one request. The first computes the prompt, the `held` ones wait for it."""

    request: Request
    rank: float  # of policy.py: the smaller, the sooner
    order: int  # breaks ties: order of arrival in the engine
    live: list[Sequence] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)
    prompt_done: bool = False
    score_prompt: bool = False  # prompt log-probabilities are asked for and not yet delivered
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache at the first admission
    chain: HashChain | None = None  # of the full blocks of the prompt


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice. `num_computed` chases `num_tokens`: prefill, decode and resumption are all the same."""

    seq_id: int
    group: Group
    choice: int
    prompt_ids: list[int]
    output_ids: list[int]
    max_tokens: int  # in force: bounded by the context
    num_tokens: int = 0  # known: prompt and output
    num_computed: int = 0  # keys and values are in the blocks
    num_planned: int = 0  # num_computed once the steps in flight are applied
    table: list[int] = field(default_factory=list)  # append-only; replaced, never cleared, when released
    chain: HashChain | None = None
    scores: list[ScoredToken] | None = None  # prompt log-probabilities so far; None: not this one's task
    epoch: int = 0  # raised when blocks are released: results of older plans no longer count
    sampling: int = 0  # steps in flight that draw a token of it, each behind the last
    draft: Draft | None = None  # None: nothing is guessed
    last_step: int = -1  # for the rotation when the budget is short
    preemptions: int = 0
    passed: int = 0  # times a later one was admitted while this one did not fit
    key: tuple[float, int, int] = (0.0, 0, 0)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_ids) + len(self.output_ids)
        self.key = (self.group.rank, self.group.order, self.choice)

    def tokens(self, start: int, end: int) -> list[int]:
        """The token ids at positions start, …, end - 1."""
        split = len(self.prompt_ids)
        if start >= split:
            return self.output_ids[start - split : end - split]
        if end <= split:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:] + self.output_ids[: end - split]

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        self.num_tokens += 1

    def take_scores(self) -> tuple[ScoredToken, ...] | None:
        """The prompt's log-probabilities, once."""
        if self.scores is None:
            return None
        scores, self.scores = tuple(self.scores), None
        self.group.score_prompt = False
        return scores

    def release(self) -> None:
        """Forget what was computed; the caller gives the blocks back."""
        self.table = []
        self.chain = None
        self.scores = None
        self.num_computed = self.num_planned = 0
        self.sampling = 0
        self.epoch += 1
