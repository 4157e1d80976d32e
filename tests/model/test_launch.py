"""Steps launched one behind the other, through Triton's kernels: the tokens of steps run one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from headrace.errors import HeadraceError
from headrace.messages import SamplingParams
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.outputs import TokenOutput
from worker.engine.plan import SamplePlan, ScoredToken, SequencePlan, StepPlan, StepResult
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.model.launched import as_drawn
from worker.model.runner import ModelRunner
from worker.model.selftest import make_reference

WHY = "triton is not installed"
graphs: Any = pytest.importorskip("worker.model.graphs", reason=WHY)
models: Any = pytest.importorskip("worker.model.triton_model", reason=WHY)
samplers: Any = pytest.importorskip("worker.model.triton_sampler", reason=WHY)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 101
CONFIG: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=1,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=12,
    pad_token_id=0,
)


class Replay:
    """In a graph's place where there is no card: what a step gives is written where the last one was."""

    def __init__(self, model: Any, kv: Any, buffers: Any) -> None:
        self.model, self.kv, self.buffers = model, kv, buffers
        self.logits = torch.zeros(buffers.batch, VOCAB)

    def replay(self) -> None:
        self.logits.copy_(self.model.run(self.buffers.step, self.kv))

    def pool(self) -> None:
        return None


def replayed(model: Any, kv: Any, buffers: Any, pool: object) -> Any:
    replay = Replay(model, kv, buffers)
    return graphs.Graph(buffers, replay.logits, replay)


@pytest.fixture(scope="module")
def loaded(kit: SimpleNamespace) -> Iterator[Any]:
    from headrace_kernels import dispatch

    tiny, plain = kit.tiny_model(transformers.LlamaConfig(**CONFIG))
    reference = make_reference(plain, VOCAB, 64, torch.device("cpu"))
    forward = models.try_triton(plain, reference, DEVICE, torch.float32)
    chosen = dispatch.resolve("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "backend", lambda: chosen)  # for the sampler
        yield replace(tiny, forward=forward, device=DEVICE)


@pytest.fixture(params=["plain", "replayed"])
def runner(loaded: Any, request: Any) -> ModelRunner:
    made = ModelRunner(loaded, num_blocks=24, block_size=16, warm_up=False, graphs=False)
    if request.param == "replayed":
        with pytest.MonkeyPatch.context() as patch:
            if DEVICE.type != "cuda":
                patch.setattr(graphs, "_capture", replayed)
            made.forward = graphs.GraphedModel(loaded.forward, made.kv, 64, (1, 4))
    assert made.steps_in_flight == 2
    assert isinstance(made.sampler, samplers.TritonSampler)
    return made


REQUESTS = [
    ([5, 9, 4], SamplingParams(max_tokens=7, temperature=0.0)),
    ([7] * 14, SamplingParams(max_tokens=6, temperature=0.9, top_p=0.9)),
    ([3, 8], SamplingParams(max_tokens=5, temperature=1.2, top_k=20, n=2)),
]
HOST = ([11, 12], SamplingParams(max_tokens=2, temperature=0.0, logprobs=1, presence_penalty=0.5))


def answers(runner: ModelRunner, plan_ahead: bool) -> tuple[dict[Any, Any], list[StepPlan]]:
    """Also with a stop amid an answer, and one that comes later and needs the host."""
    engine = Engine(
        Scheduler(EngineConfig(num_blocks=24, max_model_len=64, plan_ahead=plan_ahead)), runner, lambda: 0.0
    )
    plans: list[StepPlan] = []
    plan = engine.scheduler.plan

    def noted(now: float) -> StepPlan | None:
        made = plan(now)
        plans.extend([made] if made else [])
        return made

    engine.scheduler.plan = noted  # type: ignore[method-assign]
    for i, (prompt, params) in enumerate(REQUESTS):
        engine.add(Request(f"r{i}", prompt, params, seed=i, eos_ids=frozenset(range(0, VOCAB, 9))))
    told: dict[Any, Any] = {}
    for turn in range(100):
        if turn == 4:
            engine.add(Request("host", HOST[0], HOST[1], seed=9))
        if not engine.has_work:
            return told, plans
        for output in engine.step():
            assert isinstance(output, TokenOutput)
            told.setdefault((output.request_id, output.choice), []).append((output.scored, output.finish))
    raise AssertionError("still working")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what lies in the row without a sequence
def test_an_engine_that_plans_ahead_says_the_same(runner: ModelRunner) -> None:
    serial, _ = answers(runner, False)
    ahead, plans = answers(runner, True)
    assert ahead == serial
    assert {finish for said in serial.values() for _, finish in said} == {None, "stop", "length"}
    assert sum(part.pending for plan in plans for part in plan.sequences) > 6


def decode(seq_id: int, table: int, at: int, token: int | None, params: SamplingParams) -> SequencePlan:
    """One token, or the pending one; the draw's position is the token's own."""
    sample = SamplePlan(params, seq_id, 0, at, (), (), False)
    return SequencePlan(seq_id, [token or 0], at, [table], sample, pending=token is None)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_step_that_needs_the_host_is_read_before_the_next_is_queued(runner: ModelRunner) -> None:
    """Its tokens go on in the next step all the same, in another order and with others beside them."""
    scored, drawn = SamplingParams(temperature=0.0, logprobs=2), SamplingParams(temperature=1.0)
    plans = [
        StepPlan(0, (decode(1, 3, 0, 17, scored), decode(2, 4, 0, 18, drawn))),
        StepPlan(
            1, (decode(3, 5, 0, 19, drawn), decode(2, 4, 1, None, drawn), decode(1, 3, 1, None, scored))
        ),
        StepPlan(2, (decode(2, 4, 2, None, drawn), decode(3, 5, 1, None, drawn))),
    ]
    told: list[StepResult] = []
    last: dict[int, ScoredToken] = {}
    for plan in plans:
        parts = [
            decode(p.seq_id, p.block_table[0], p.start, last[p.seq_id].token_id, p.sample.params)
            if p.pending and p.sample
            else p
            for p in plan.sequences
        ]
        told.append(runner.run(StepPlan(plan.step, tuple(parts))))
        last |= told[-1].sampled
    first, second = runner.launch(plans[0]), runner.launch(plans[1])
    assert [first.result(), second.result(), runner.launch(plans[2]).result()] == told


def test_logits_yet_to_be_read_are_not_overwritten(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    plans = [StepPlan(i, (decode(i, i, 0, 17 + i, params),)) for i in range(3)]
    told = [runner.run(plan) for plan in plans]
    launched = [runner.launch(plan) for plan in plans]
    assert [step.result() for step in launched] == told


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_that_is_not_finite_fails_and_what_follows_it_does_no_harm(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=0.0)
    logits = runner.forward.logits

    def poisoned(inputs: Any, kv: Any, rows: Any) -> torch.Tensor:
        out = logits(inputs, kv, rows).clone()
        out[0, 3] = torch.nan if len(out) == 2 else 0.0
        return out

    runner.forward.logits = poisoned
    first = runner.launch(StepPlan(0, (decode(1, 3, 0, 17, params), decode(2, 4, 0, 18, params))))
    second = runner.launch(StepPlan(1, (decode(1, 3, 1, None, params),)))
    runner.forward.logits = logits
    assert first.result().failed[1].code == "non_finite"
    assert set(first.result().sampled) == {2}
    assert set(second.result().sampled) == {1}


def test_a_pending_token_that_nobody_draws_is_an_error(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=0.0)
    with pytest.raises(RuntimeError, match="no step draws"):
        runner.launch(StepPlan(0, (decode(1, 3, 1, None, params),)))
    runner.launch(StepPlan(0, (decode(2, 3, 1, 5, params),)))
    with pytest.raises(KeyError):
        runner.launch(StepPlan(0, (decode(1, 3, 1, None, params),)))


def test_tokens_drawn_without_waiting_are_the_samplers() -> None:
    logits = 3 * torch.randn(9, 300, generator=torch.Generator().manual_seed(2))
    logits[4, 7], logits[5, 8] = torch.nan, -torch.inf
    plans = [
        SamplePlan(SamplingParams(temperature=t, top_k=k, top_p=p), i, 0, 4, (1, 2), (3, 4), False)
        for i, (t, k, p) in enumerate(
            [(0.0, 0, 1.0), (0.7, 0, 1.0), (1.4, 20, 0.8), (1.0, 1, 1.0), (0.0, 0, 1.0)] + [(1.0, 0, 0.9)] * 4
        )
    ]
    sampler = samplers.TritonSampler(290, [2])
    for few in (plans, [plans[0]] * 9):
        ids = sampler.begin(logits.to(DEVICE), few)
        got, want = [as_drawn(i) for i in ids.tolist()], sampler.sample(logits.to(DEVICE), few)
        assert [_outcome(row) for row in got] == [_outcome(row) for row in want]
    assert sampler.begin(logits[:0], []).tolist() == []
    for extra in ({"logprobs": 0}, {"presence_penalty": 0.1}, {"logit_bias": {3: 1.0}}):
        asks = SamplePlan(SamplingParams(**extra), 0, 0, 0, (), (), False)
        assert sampler.begin(logits[:2], [plans[0], asks]) is None


def _outcome(row: ScoredToken | HeadraceError) -> ScoredToken | str:
    return row if isinstance(row, ScoredToken) else row.code
