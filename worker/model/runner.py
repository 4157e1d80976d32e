"""Computes one StepPlan: inputs, model, sampler. Holds the KV tensors, knows nothing of scheduling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.messages import SamplingParams
from headrace_kernels import dispatch
from worker.engine.plan import SamplePlan, ScoredToken, SequencePlan, StepPlan, StepResult
from worker.model.inputs import StepInputs, build_inputs
from worker.model.kv import KVCache
from worker.model.launched import Launched, as_drawn
from worker.model.loader import LoadedModel
from worker.model.sampler import Drawn, Sampler, score_tokens
from worker.model.threads import torch_threads
from worker.model.transfer import Readout

SCORED_ROWS = 64  # prompt rows scored at a time, which bounds the log-softmax kept
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The logits rows first … first + len(targets) - 1 score the prompt tokens `targets` of a sequence."""

    seq_id: int
    first: int
    targets: tuple[int, ...]
    k: int


class ModelRunner:
    """Runs steps for one model. `encode_bad_word` spells a bad word in tokens, in every way to be banned.

    `graphs`: replay decode steps as CUDA graphs where the model and the device permit.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        encode_bad_word: Callable[[str], Sequence[Sequence[int]]] | None = None,
        warm_up: bool = True,
        graphs: bool = True,
    ) -> None:
        self.loaded = loaded
        self.kv = KVCache(loaded.layers, num_blocks, block_size, loaded.kv_dtype, loaded.device)
        self.forward = loaded.forward
        # Triton's model copies them itself, all at once where a graph is replayed.
        self._inputs_device = torch.device("cpu") if loaded.forward.way == "triton" else loaded.device
        if graphs and loaded.forward.way == "triton":
            from worker.model.graphs import with_graphs

            self.forward = with_graphs(loaded.forward, self.kv, loaded.max_model_len)
        self.sampler = _sampler_class()(loaded.tokenizer_vocab_size, sorted(loaded.eos_ids), encode_bad_word)
        self._last: Launched | None = None
        if warm_up:
            self._warm_up()

    @property
    def steps_in_flight(self) -> int:
        """How many steps may be launched before the first of them is waited for."""
        return 2 if getattr(self.forward, "takes_fed", False) else 1

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan. A sequence that fails is named in the result and does not touch the others."""
        self._last = None
        self.kv.copy_blocks(plan.block_copies)
        if not plan.sequences:
            return StepResult({})
        inputs = build_inputs(plan, self.kv.block_size, self._inputs_device)
        rows, samples, prompts = _wanted_rows(plan, inputs)
        return self._draw(plan, self.forward.logits(inputs, self.kv, rows), samples, prompts)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Queue the plan behind the one launched last, which draws the tokens that are pending in it."""
        last, self._last = self._last, None
        if last is not None:
            last.leave()
        self.kv.copy_blocks(plan.block_copies)
        inputs = build_inputs(plan, self.kv.block_size, self._inputs_device)
        if any(s.pending for s in plan.sequences):
            if last is None:
                raise RuntimeError("tokens are pending, and no step draws them")
            inputs = replace(inputs, fed=last.feed(plan, inputs, self.loaded.device))
        rows, samples, prompts = _wanted_rows(plan, inputs)
        logits = self.forward.logits(inputs, self.kv, rows)
        ids = None if prompts or _guesses(plan) else self.sampler.begin(logits, samples)
        if ids is None:
            self._last = Launched(plan, None, partial(self._draw, plan, logits, samples, prompts))
        else:
            self._last = Launched(plan, ids, partial(_read, plan, Readout(ids)))
        return self._last

    def _draw(
        self, plan: StepPlan, logits: Tensor, samples: Sequence[SamplePlan], prompts: Sequence[PromptRows]
    ) -> StepResult:
        with torch_threads(1):  # many short operations, for which waking threads costs more than they save
            drawn = self.sampler.sample(logits[: len(samples)], samples)
            result = _by_sequence(plan, drawn)
            failed = dict(result.failed)
            scored = self._score_prompts(logits, prompts, failed)
        return replace(result, failed=failed, prompt_logprobs=scored)

    def forget(self, seq_id: int) -> None:
        """The sequence is gone. Packed models keep nothing for a sequence but its blocks."""

    def _score_prompts(
        self, logits: Tensor, prompts: Sequence[PromptRows], failed: dict[int, HeadraceError]
    ) -> dict[int, tuple[ScoredToken, ...]]:
        scored: dict[int, tuple[ScoredToken, ...]] = {}
        for p in prompts:
            rows = logits[p.first : p.first + len(p.targets), : self.sampler.vocab_size]
            if not bool(rows.isfinite().all()):
                failed.setdefault(p.seq_id, HeadraceError("non_finite"))
            elif p.seq_id not in failed:
                scored[p.seq_id] = _score_in_parts(rows, p.targets, p.k)
        return scored

    def _warm_up(self) -> None:
        """A chunk and a decode, so that the first request does not pay for what is prepared on first use."""
        run = self.run if self.steps_in_flight == 1 else lambda plan: self.launch(plan).result()
        block_size = self.kv.block_size
        count = min(_WARM_UP_TOKENS, self.kv.num_blocks * block_size - 1)
        table = range(-(-(count + 1) // block_size))
        greedy = SamplePlan(SamplingParams(temperature=0.0), 0, 0, 0, (), (), False)
        for start, size in ((0, count), (count, 1)):
            if size:
                run(StepPlan(0, (SequencePlan(0, [0] * size, start, table, greedy),)))


def _sampler_class() -> type[Sampler]:
    if dispatch.backend().name != "triton":
        return Sampler
    from worker.model.triton_sampler import TritonSampler

    return TritonSampler


def _wanted_rows(plan: StepPlan, inputs: StepInputs) -> tuple[Tensor, list[SamplePlan], list[PromptRows]]:
    """Packed tokens whose logits are needed: first those to draw from, then those that score prompts."""
    lasts = inputs.cu_seqlens[1:] - 1
    drawn = [
        (lasts[i] - s.num_guesses + n, s.sample.behind(n) if n else s.sample)
        for i, s in enumerate(plan.sequences)
        if s.sample is not None
        for n in range(s.num_guesses + 1)
    ]
    parts = [np.array([row for row, _ in drawn], np.int64)]
    prompts, count = [], len(drawn)
    for i, sequence in enumerate(plan.sequences):
        targets = _prompt_targets(sequence)
        if targets:
            prompts.append(PromptRows(sequence.seq_id, count, targets, sequence.prompt_logprobs or 0))
            first = int(inputs.cu_seqlens[i])
            parts.append(np.arange(first, first + len(targets)))
            count += len(targets)
    rows = torch.from_numpy(np.concatenate(parts)).to(inputs.slots.device)
    return rows, [sample for _, sample in drawn], prompts


def _by_sequence(plan: StepPlan, drawn: Sequence[Drawn]) -> StepResult:
    """What was drawn in the rows of `_wanted_rows`: behind guesses up to the first that was wrong."""
    sampled: dict[int, ScoredToken] = {}
    failed: dict[int, HeadraceError] = {}
    guessed: dict[int, tuple[ScoredToken, ...]] = {}
    spoilt = set()
    rows = iter(drawn)
    for s in plan.sequences:
        if s.sample is None:
            continue
        first, *behind = (next(rows) for _ in range(s.num_guesses + 1))
        if behind and not all(_is_finite(row) for row in (first, *behind)):
            spoilt.add(s.seq_id)  # a masked NaN is still one: it reaches rows before it, and the blocks
        elif isinstance(first, HeadraceError):
            failed[s.seq_id] = first
        else:
            sampled[s.seq_id] = first
            if behind:
                guesses = s.token_ids[len(s.token_ids) - s.num_guesses :]
                guessed[s.seq_id] = _right(first, behind, guesses)
    return StepResult(sampled, failed, {}, guessed, frozenset(spoilt))


def _read(plan: StepPlan, ids: Readout) -> StepResult:
    return _by_sequence(plan, [as_drawn(token_id) for token_id in ids.wait()])


def _guesses(plan: StepPlan) -> bool:
    return any(s.num_guesses for s in plan.sequences)


def _is_finite(row: Drawn) -> bool:
    return not (isinstance(row, HeadraceError) and row.code == "non_finite")


def _right(first: ScoredToken, behind: Sequence[Drawn], guesses: Sequence[int]) -> tuple[ScoredToken, ...]:
    right: list[ScoredToken] = []
    last = first
    for row, guess in zip(behind, guesses, strict=True):
        if last.token_id != guess or isinstance(row, HeadraceError):
            break
        right.append(row)
        last = row
    return tuple(right)


def _prompt_targets(sequence: SequencePlan) -> tuple[int, ...]:
    if sequence.prompt_logprobs is None:
        return ()
    after = () if sequence.next_prompt_id is None else (sequence.next_prompt_id,)
    return (*sequence.token_ids[1:], *after)


def _score_in_parts(rows: Tensor, targets: Sequence[int], k: int) -> tuple[ScoredToken, ...]:
    scored: list[ScoredToken] = []
    for at in range(0, len(targets), SCORED_ROWS):
        scored += score_tokens(rows[at : at + SCORED_ROWS], targets[at : at + SCORED_ROWS], k)
    return tuple(scored)
