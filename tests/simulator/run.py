"""Simulates a case, and scores what the analysis charges against what the injections truly cost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tracekern
from simulator.capture import START_NS, write_capture
from simulator.cases import Case
from simulator.engine import Engine, Kernel, TrueWait
from simulator.programs import programs_of
from tracekern.analysis.causes.analyze import Causes, Cost, analyze_causes
from tracekern.analysis.causes.blame import Target
from tracekern.analysis.waits.analyze import analyze_waits


@dataclass(frozen=True)
class Truth:
    """What happened, in true ns, and where its capture is."""

    case: Case
    seed: int
    directory: Path
    waits: tuple[TrueWait, ...]
    """All waits, for other ranks and for warps of the same rank."""
    kernels: dict[int, list[Kernel]]
    """By rank, in their order."""

    @property
    def makespan_ns(self) -> float:
        """From the start of the first kernel to the end of the last."""
        kernels = [kernel for of_rank in self.kernels.values() for kernel in of_rank]
        return max(kernel.end_ns for kernel in kernels) - min(kernel.start_ns for kernel in kernels)

    @property
    def charged_ns(self) -> float:
        """Waiting that the analysis charges to causes."""
        return sum(wait.charged_ns for wait in self.waits)


@dataclass(frozen=True)
class Score:
    """How well the analysis charged what was injected: with minus without, of the same seed."""

    caused_ns: float
    """E: what the injections made the ranks wait, by true times."""
    charged_ns: float
    """D: what is charged to what was injected, by rank (or link) and kind."""
    others_ns: float
    """What is charged to anything else; each cause counts where it rose."""

    @property
    def score(self) -> float:
        return min(self.charged_ns, self.caused_ns) / self.caused_ns

    @property
    def ratio(self) -> float:
        """D / E."""
        return self.charged_ns / self.caused_ns

    @property
    def elsewhere(self) -> float:
        """Share of E that is charged elsewhere."""
        return self.others_ns / self.caused_ns


def simulate(case: Case, seed: int, directory: Path) -> Truth:
    """Runs the case and writes its capture into `directory`, which must hold none."""
    directory.mkdir(parents=True, exist_ok=True)
    run = Engine(case, seed, START_NS).run(programs_of(case))
    write_capture(case, run, seed, directory)
    return Truth(case, seed, directory, tuple(run.waits), dict(run.kernels))


def causes_of(truth: Truth) -> Causes:
    """What the analysis makes of the capture."""
    timeline = tracekern.load(truth.directory)
    return analyze_causes(timeline, analyze_waits(timeline))


def score(case: Case, seed: int, directory: Path) -> Score:
    """Simulates the case with and without its injections, below `directory`."""
    caused, charges = 0.0, []
    for name, sign, one in (("with", 1, case), ("without", -1, case.without_injections())):
        truth = simulate(one, seed, directory / name)
        caused += sign * truth.charged_ns
        charges.append(_charges(case, causes_of(truth).costs))
    right = charges[0].pop(None, 0.0) - charges[1].pop(None, 0.0)
    others = sum(max(ns - charges[1].get(cause, 0.0), 0.0) for cause, ns in charges[0].items())
    return Score(caused, right, others)


def _charges(case: Case, costs: tuple[Cost, ...]) -> dict[tuple[int, Target, int] | None, float]:
    """(rank, kind, peer) -> ns; None for what was injected."""
    found: dict[tuple[int, Target, int] | None, float] = defaultdict(float)
    for cost in costs:
        is_right = any(entry.is_cause(cost) for entry in case.injections)
        found[None if is_right else (cost.rank, cost.target, cost.peer)] += cost.total_ns
    return dict(found)
