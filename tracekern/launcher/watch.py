"""Watches the progress of launched ranks, so that nothing that hangs does so for ever or without a word.

A run has four phases: start, set-up, run and close. A rank tells which one it enters, and the launcher allows each a
time without progress. Progress is a line of any rank, or that any of them computes: waits inside kernels, which spin,
have limits of their own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tracekern.formatting import ranks as name_ranks

START, SET_UP, RUN, CLOSE = "start", "set-up", "run", "close"
PHASES = (START, SET_UP, RUN, CLOSE)

_PHASE_LINE = "tracekern-phase "
_LOOK_EVERY_S = 1.0
_BUSY_SHARE = 0.25
"""Share of a core that processes use together while they make progress. Those that poll use less."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Limits:
    """The longest time without progress in each phase, in seconds."""

    start_s: float = 60.0
    """Includes the import of torch, which may take a minute from a cold disk."""
    set_up_s: float = 60.0
    run_s: float = 60.0
    close_s: float = 60.0
    raised_by: str = "launch_ranks(limits=...)"
    """The option or argument that raises them, as errors name it."""

    def of(self, phase: str) -> float:
        return {START: self.start_s, SET_UP: self.set_up_s, RUN: self.run_s, CLOSE: self.close_s}[phase]


def enter(phase: str) -> None:
    """Tells the launcher, in a rank that it started, which phase begins."""
    if is_launched():
        sys.stdout.write(f"{_PHASE_LINE}{phase}\n")
        sys.stdout.flush()


def is_launched() -> bool:
    """Returns whether tracekern's launcher started this process."""
    return "TRACEKERN_STORE" in os.environ


class Watch:
    """The launcher's view of its ranks' progress."""

    def __init__(self, num_ranks: int, limits: Limits, tells_phases: bool, num_residents: int = 0) -> None:
        """tells_phases: the ranks call enter(). If not, the watch is over once they have started.

        num_residents: number of ranks if they are threads of one process, which is the only rank here.
        """
        self._limits = limits
        self._tells_phases = tells_phases
        self._num_residents = num_residents
        self._phases: list[str | None] = [START] * num_ranks
        self._progress_s = self._looked_s = time.monotonic()
        self._used_ticks = 0

    def phase(self, rank: int) -> str:
        """Returns the phase that a rank is in; "" if it has started and tells none."""
        return self._phases[rank] or ""

    def is_setting_up(self) -> bool:
        """Returns whether the ranks tell phases, and none has got beyond the set-up."""
        return self._tells_phases and all(phase in (START, SET_UP) for phase in self._phases)

    def name(self, ranks: list[int]) -> str:
        """Returns what a user is told instead of the ranks' numbers."""
        return f"the process of all {self._num_residents} ranks" if self._num_residents else name_ranks(ranks)

    def started(self, rank: int) -> None:
        """Notes that the process of a rank runs."""
        self._progress_s = time.monotonic()
        if not self._tells_phases:
            self._phases[rank] = None

    def heard(self, rank: int, line: str) -> bool:
        """Notes a line of a rank. Returns whether it was for the launcher only."""
        self._progress_s = time.monotonic()
        is_own = line.startswith(_PHASE_LINE)
        if is_own and line[len(_PHASE_LINE) :] in PHASES:
            self._phases[rank] = line[len(_PHASE_LINE) :]
        return is_own

    def overdue(self, running: Mapping[int, int], starter: int) -> dict[int, str]:
        """Returns what to say of the ranks that hold up the others, by rank; empty while the run makes progress.

        running: process ids of the ranks that have not ended, by rank. starter: the process that starts them, whose id
        stands for a rank that has not started; 0 for none.
        """
        now = time.monotonic()
        if now - self._looked_s < _LOOK_EVERY_S:
            return {}
        if self._is_busy({starter, *running.values()}, now - self._looked_s):
            self._progress_s = now
        self._looked_s = now
        active = {rank: pid for rank, pid in running.items() if not _has_ended(pid)}
        phases = [phase for rank in active if (phase := self._phases[rank])]
        if active and not phases:
            return {}
        phase = min(phases, key=PHASES.index, default=CLOSE)
        # Of ranks that have ended, only the starter has yet to tell so.
        limit_s = self._limits.of(phase) if active else self._limits.start_s
        if now - self._progress_s <= limit_s:
            return {}
        missed = f"did not start within {limit_s:.0f} s"
        if phase != START:
            missed = f"made no progress for {limit_s:.0f} s during {phase}"
        return self._explain(running, starter, missed, [rank for rank in active if self._phases[rank] == phase])

    def _explain(self, running: Mapping[int, int], starter: int, missed: str, late: list[int]) -> dict[int, str]:
        stopped = [rank for rank, pid in running.items() if pid != starter and is_stopped(pid)]
        if not stopped and starter and is_stopped(starter):
            return dict.fromkeys(running, f"the ranks {missed}: process {starter}, which starts them, is stopped")
        late = stopped or late or list(running)
        they, are, wait = ("it", "is", "waits") if len(late) == 1 else ("they", "are", "wait")
        why = f"see what {they} {wait} for, or allow more with {self._limits.raised_by}"
        if stopped:
            why = f"{they} {are} stopped"
        elif starter in map(running.get, late) and (forks := sorted(filter(is_stopped, children(starter)))):
            why = f"process {forks[0]} is stopped"
        return dict.fromkeys(late, f"{self.name(late)} {missed}: {why}")

    def _is_busy(self, pids: set[int], elapsed_s: float) -> bool:
        """Returns whether processes have computed since the last look."""
        before, self._used_ticks = self._used_ticks, sum(map(_used_ticks, pids))
        return self._used_ticks - before > _BUSY_SHARE * elapsed_s * _TICKS_PER_S


def is_stopped(pid: int) -> bool:
    """Returns whether a signal or a debugger has stopped a process."""
    return _stat(pid)[:1] in (["T"], ["t"])


def children(pid: int, thread: int = 0) -> set[int]:
    """Returns the children that a thread of a process has started; 0: its main thread."""
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{thread or pid}/children").read_text().split()))
    except OSError:  # it has ended, or the kernel has no such file
        return set()


def _has_ended(pid: int) -> bool:
    """Returns whether a process waits only for its parent to ask how it ended."""
    return _stat(pid)[:1] == ["Z"]


def _used_ticks(pid: int) -> int:
    """Returns the CPU time that a process has used, in clock ticks; 0 if it is gone."""
    return sum(map(int, _stat(pid)[11:13]))


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the process's name; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
