"""Where each sequence is: held behind its group's prompt, waiting or running; and every move between them."""

from __future__ import annotations

from worker.engine.batching import AdmissionGate
from worker.engine.kv import KvManager, Placement
from worker.engine.policy import OrderedSequences
from worker.engine.request import Group, Sequence


class Roster:
    """The live groups and their sequences; a sequence that leaves gives its blocks back at once."""

    def __init__(self, kv: KvManager, gate: AdmissionGate) -> None:
        self.kv = kv
        self.gate = gate
        self.groups: dict[str, Group] = {}
        self.waiting = OrderedSequences()
        self.running = OrderedSequences()
        self.num_held = 0
        self.released: list[int] = []  # seq_ids of which the runner need not know any more

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self.num_held

    def enter(self, group: Group) -> None:
        """The first choice waits for admission, the others for its prompt."""
        self.groups[group.request.request_id] = group
        group.held = list(group.live)
        self.num_held += len(group.held)
        self._unhold(group, 1)

    def admit(self, seq: Sequence, where: Placement) -> tuple[int, int] | None:
        """From waiting to running. Returns the block copy that this takes, if any."""
        group = seq.group
        self.waiting.discard(seq)
        self.running.add(seq)
        self.gate.admitted()
        seq.passed = 0
        if group.cached_tokens is None:
            group.cached_tokens = min(where.hit_tokens, len(seq.prompt_ids))
        if group.score_prompt and seq is group.live[0]:
            seq.scores = []
        return self.kv.place(seq, where)

    def preempt(self, seq: Sequence) -> None:
        """From running back to its old place among the waiting; everything is computed again."""
        self.running.discard(seq)
        self._let_go(seq)
        seq.preemptions += 1
        self.waiting.add(seq)
        self.gate.returned()

    def leave(self, seq: Sequence) -> None:
        """The sequence is complete, aborted or failed."""
        group = seq.group
        if not self.running.discard(seq) and not self.waiting.discard(seq):
            group.held.remove(seq)
            self.num_held -= 1
        self._let_go(seq)
        group.live.remove(seq)
        if not group.live:
            del self.groups[group.request.request_id]
        elif not group.prompt_done and group.live[0] in group.held:
            self._unhold(group, 1)

    def leave_all(self, group: Group) -> None:
        while group.live:
            self.leave(group.live[-1])

    def prompt_done(self, group: Group) -> None:
        """The prompt is computed: the other choices may share it."""
        group.prompt_done = True
        self._unhold(group, len(group.held))

    def _unhold(self, group: Group, count: int) -> None:
        for seq in group.held[:count]:
            self.waiting.add(seq)
        del group.held[:count]
        self.num_held -= count

    def _let_go(self, seq: Sequence) -> None:
        self.kv.release(seq)
        if seq.last_step >= 0:
            self.released.append(seq.seq_id)
