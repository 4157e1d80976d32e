"""A step that was queued on the device: its result when somebody waits, its tokens for the step behind it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.errors import HeadraceError
from worker.engine.plan import ScoredToken, StepPlan, StepResult
from worker.model.inputs import Fed, StepInputs
from worker.model.sampler import Drawn
from worker.model.transfer import send


class Launched:
    """`ids`: of the rows drawn, in the plan's order, on the device. Without them `finish` draws yet."""

    def __init__(self, plan: StepPlan, ids: Tensor | None, finish: Callable[[], StepResult]) -> None:
        self._ids = ids
        self._finish = finish
        self._result: StepResult | None = None
        drawing = (s.seq_id for s in plan.sequences if s.sample is not None)
        self._rows = {seq_id: row for row, seq_id in enumerate(drawing)}

    def result(self) -> StepResult:
        """Waits for the step."""
        if self._result is None:
            with torch.inference_mode():
                self._result = self._finish()
            del self._finish  # and the logits with it
        return self._result

    def leave(self) -> None:
        """Before the next step is queued, which may overwrite the logits."""
        if self._ids is None:
            self.result()

    def feed(self, plan: StepPlan, inputs: StepInputs, device: torch.device) -> Fed | None:
        """What this step has drawn, or will have, for the tokens of the next that are pending."""
        firsts = zip(plan.sequences, inputs.cu_seqlens.tolist(), strict=False)
        pending = [(at, self._rows[s.seq_id]) for s, at in firsts if s.pending]
        if not pending:
            return None
        places, rows = send(torch.tensor(pending).T.contiguous(), device)
        ids = self._told(device) if self._ids is None else self._ids
        return Fed(places, ids.index_select(0, rows).clamp_min(0))  # -1 in a row that failed

    def _told(self, device: torch.device) -> Tensor:
        sampled = self.result().sampled
        return send(torch.tensor([sampled[i].token_id if i in sampled else 0 for i in self._rows]), device)


def as_drawn(token_id: int) -> Drawn:
    """From an id of `Sampler.begin`."""
    return ScoredToken(token_id, 0.0) if token_id >= 0 else HeadraceError("non_finite")
