"""Simulates a case."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simulator.capture import START_NS, write_capture
from simulator.cases import Case
from simulator.engine import Engine, Kernel, Record, Run, TrueWait
from simulator.programs import programs_of


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
        return _makespan_ns(self.kernels)

    @property
    def cost_ns(self) -> float:
        """How much longer the run is with all that is injected."""
        return self.makespan_ns - _makespan_ns(_run(self.case.without_injections(), self.seed).kernels)


def simulate(case: Case, seed: int, directory: Path) -> Truth:
    """Runs the case and writes its capture into `directory`, which must hold none."""
    directory.mkdir(parents=True, exist_ok=True)
    run = _run(case, seed)
    write_capture(case, run, seed, directory)
    return Truth(case, seed, directory, tuple(run.waits), dict(run.kernels))


def simulate_groups(groups: Mapping[tuple[int, ...], Case], seed: int, directory: Path) -> Path:
    """Runs a case in each group of ranks, side by side, and writes one capture of the world. Returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    kernels, records = dict[int, list[Kernel]](), list[Record]()
    for number, (ranks, case) in enumerate(groups.items()):
        run = _run(dataclasses.replace(case, num_ranks=len(ranks)), seed + number)
        kernels |= {ranks[own]: of_rank for own, of_rank in run.kernels.items()}
        for record in run.records:
            warp = record.warp._replace(rank=ranks[record.warp.rank])
            records.append(dataclasses.replace(record, warp=warp))
    world = dataclasses.replace(next(iter(groups.values())), num_ranks=len(kernels))
    members = {rank: {"name": f"group {min(ranks)}", "ranks": list(ranks)} for ranks in groups for rank in ranks}
    write_capture(world, Run(kernels, records, []), seed, directory, members)
    return directory


def _run(case: Case, seed: int) -> Run:
    return Engine(case, seed, START_NS).run(programs_of(case))


def _makespan_ns(kernels: dict[int, list[Kernel]]) -> float:
    """From the start of the first kernel to the end of the last."""
    every = [kernel for of_rank in kernels.values() for kernel in of_rank]
    return max(kernel.end_ns for kernel in every) - min(kernel.start_ns for kernel in every)
