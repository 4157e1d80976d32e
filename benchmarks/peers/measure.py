"""Rounds in which everybody takes a turn: what slows the machine meanwhile slows all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks import machine
from benchmarks.figures import Summary
from benchmarks.load import LoadError
from benchmarks.peers import probe
from benchmarks.peers.candidates import Candidate
from benchmarks.peers.processes import own_tree, peaks_mib
from benchmarks.peers.sessions import Session, Settings
from benchmarks.peers.work import (
    Mode,
    decode_tokens_per_s,
    requests_of,
    summary_of,
    tokens_a_request,
    warm_up,
)
from benchmarks.serving import ServingError
from headrace.embedded import EmbeddedRedisError

SETTLE_S = 0.5
SHARES = (0.5, 0.9)  # of the best peer's capacity
FAILURES = (LoadError, ServingError, EmbeddedRedisError, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class Run:
    """One candidate, one mode, one round. `decode_tokens_per_s`: single stream, after its first token."""

    candidate: str
    mode: Mode
    round: int
    summary: Summary
    decode_tokens_per_s: float | None
    cpu: machine.CpuUse | None
    speed: probe.Speed
    start_s: float
    peaks_mib: Mapping[str, int]  # of each of its process trees
    quiet: bool

    @property
    def peak_mib(self) -> int:
        return sum(self.peaks_mib.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """`modes` of offline, single, online. No `rates_per_s`: shares of the best peer's capacity.

    A run in which others use more than `quiet_cores` is done again, at most `again` times.
    """

    candidates: Sequence[Candidate]
    modes: Sequence[str]
    rounds: int
    online_rounds: int
    rates_per_s: Sequence[float]
    threads: int
    quiet_cores: float
    again: int
    logs: Path


@dataclass(slots=True)
class Comparison:
    """Does a plan and keeps what it found."""

    plan: Plan
    console: Console
    runs: list[Run] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Settings] = field(default_factory=dict)  # by candidate, as its server told them

    def run(self) -> None:
        at_once = [Mode(name) for name in self.plan.modes if name != "online"]
        if at_once:
            self._rounds(self.plan.rounds, at_once)
        if "online" in self.plan.modes:
            self._rounds(self.plan.online_rounds, [Mode("online", rate) for rate in self._rates()])

    def _rounds(self, rounds: int, modes: Sequence[Mode]) -> None:
        for number in range(rounds):
            for candidate in _turned(self.plan.candidates, number):
                wanted = [mode for mode in modes if mode.name in candidate.modes]
                if wanted and candidate.name not in self.failed:
                    self._try(candidate, wanted, number)

    def _try(self, candidate: Candidate, modes: Sequence[Mode], number: int) -> None:
        try:
            asyncio.run(self._turn(candidate, modes, number))
        except FAILURES as problem:
            self._fail(candidate, problem)
        except ExceptionGroup as group:
            known, other = group.split(FAILURES)
            if other is not None:
                raise
            self._fail(candidate, known or group)

    def _fail(self, candidate: Candidate, problem: BaseException) -> None:
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        text = str(problem) or type(problem).__name__
        self.failed[candidate.name] = f"{text.splitlines()[0]} (see {self._log(candidate)})"
        self.console.print(f"[red]  {candidate.name}: {self.failed[candidate.name]}")

    async def _turn(self, candidate: Candidate, modes: Sequence[Mode], number: int) -> None:
        begin = time.perf_counter()
        async with candidate.start(self._log(candidate)) as session:
            await session.run(warm_up()[:1])
            start_s = time.perf_counter() - begin
            self._tell(candidate, session)
            await session.run(warm_up())
            for mode in modes:
                await self._until_quiet(candidate, session, mode, number, start_s)

    def _tell(self, candidate: Candidate, session: Session) -> None:
        if candidate.name not in self.settings:
            self.settings[candidate.name] = session.settings
            self.console.print(f"  {candidate.name}: {settings_line(session.settings)}")

    async def _until_quiet(
        self, candidate: Candidate, session: Session, mode: Mode, number: int, start_s: float
    ) -> None:
        for _ in range(1 + self.plan.again):
            found = await self._measure(candidate, session, mode, number, start_s)
            self.runs.append(found)
            self.console.print(_progress(found))
            if found.quiet:
                return

    async def _measure(
        self, candidate: Candidate, session: Session, mode: Mode, number: int, start_s: float
    ) -> Run:
        requests = requests_of(mode)
        speed = probe.measure(self.plan.threads)
        await asyncio.sleep(SETTLE_S)
        before = machine.read_cpu(own_tree())
        answers = await session.run(requests)
        use = machine.cpu_use(before, machine.read_cpu(own_tree()))
        return Run(
            candidate=candidate.name,
            mode=mode,
            round=number,
            summary=summary_of(requests, answers),
            decode_tokens_per_s=decode_tokens_per_s(answers[0]) if mode.name == "single" else None,
            cpu=use,
            speed=speed,
            start_s=start_s,
            peaks_mib=peaks_mib(session.roots),
            quiet=use is None or use.others <= self.plan.quiet_cores,
        )

    def _rates(self) -> Sequence[float]:
        """Requests a second. Raises LoadError when no rate is given and nothing was measured all at once."""
        if self.plan.rates_per_s:
            return self.plan.rates_per_s
        ours = {candidate.name for candidate in self.plan.candidates if candidate.is_ours}
        offline = [run for run in self.runs if run.mode.name == "offline"]
        offline = [run for run in offline if run.candidate not in ours] or offline
        if not offline:
            raise LoadError("name the rates, or let the peers run offline in the same run")
        best = max(run.summary.tokens_per_s for run in offline) / tokens_a_request()
        return [round(share * best, 2) for share in SHARES]

    def _log(self, candidate: Candidate) -> Path:
        return self.plan.logs / f"{candidate.name.replace(':', '-')}.log"


def _turned(candidates: Sequence[Candidate], by: int) -> Iterator[Candidate]:
    """Another one goes first in each round."""
    first = by % len(candidates)
    yield from [*candidates[first:], *candidates[:first]]


def settings_line(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _progress(run: Run) -> str:
    speed = run.decode_tokens_per_s or run.summary.tokens_per_s
    noise = (
        "" if run.quiet or run.cpu is None else f"  [yellow]discarded: others used {run.cpu.others:.2f} cores"
    )
    latency = f"TTFT {run.summary.ttft_p50_ms:,.0f} ms, ITL {run.summary.itl_p50_ms:.1f} ms"
    probed = f"{run.speed.gflops:.0f} GFLOP/s, {run.speed.read_gb_s:.0f} GB/s"
    head = f"  {run.round + 1} {run.candidate:24} {run.mode.label:12} {speed:6.1f} tok/s"
    return f"{head}  {latency}  ({probed}){noise}"
