"""What the questions of a report share: each is worked out when it is first asked for, and once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tracekern.analysis.balance import Balance, LinkLimit, analyze_balance
from tracekern.analysis.causes.analyze import Causes, analyze_causes
from tracekern.analysis.critical_path.analyze import CriticalPath, critical_path
from tracekern.analysis.doubt import Blame, Worst, blame_ranks, name_worst
from tracekern.analysis.hang import Hang, find_hang
from tracekern.analysis.imbalance import Imbalance, work_imbalance
from tracekern.analysis.iterations import Iterations, find_iterations
from tracekern.analysis.summary import Summary, summarize
from tracekern.analysis.time_shares import TimeShares, share_time
from tracekern.analysis.waits.analyze import Waits, analyze_waits
from tracekern.analysis.waits.event_graph import EventGraph, build_graph
from tracekern.analysis.waits.matrix import WaitMatrix, wait_matrix
from tracekern.analysis.waits.statistics import WaitStatistic, wait_statistics
from tracekern.timeline.model import ABSENT_KINDS, CONTRADICTION_KINDS, Timeline
from tracekern.timeline.select import Window, reaches_into, select


@dataclass(eq=False)
class Findings:
    """Answers about a Timeline in ns that several parts of a report need, or that take long.

    What one part alone needs it asks of these itself. A window chooses the spans, iterations and waits that reach into
    it. Waits, their causes and hangs are worked out on the whole: what released a wait may lie outside.
    """

    timeline: Timeline
    """All of it."""
    link_limit: LinkLimit | None = None
    """GB/s that a link was measured to reach, as analyze_balance() takes it."""
    window: Window | None = None

    @cached_property
    def in_window(self) -> Timeline:
        return select(self.timeline, self.window)

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.in_window)

    @cached_property
    def time(self) -> TimeShares:
        return share_time(self.in_window)

    @cached_property
    def balance(self) -> Balance:
        return analyze_balance(self.in_window, self.link_limit)

    @cached_property
    def imbalances(self) -> tuple[Imbalance, ...]:
        return work_imbalance(self.in_window)

    @cached_property
    def iterations(self) -> Iterations:
        every = find_iterations(self.timeline)
        return every.take(reaches_into(self.window, every.start, every.end))

    @cached_property
    def every_wait(self) -> Waits:
        """Those outside the window too."""
        return analyze_waits(self.timeline)

    @cached_property
    def waits(self) -> Waits:
        every, spans = self.every_wait, self.timeline.spans
        if self.window is None:
            return every
        return every.take(np.flatnonzero(reaches_into(self.window, spans.start[every.row], spans.end[every.row])))

    @cached_property
    def phases(self) -> tuple[WaitStatistic, ...]:
        """Waits by phase, largest sum first."""
        return wait_statistics(self.waits, by=("phase",))

    @cached_property
    def blames(self) -> tuple[Blame, ...]:
        return blame_ranks(self.timeline, self.waits)

    @cached_property
    def verdict(self) -> Worst:
        """Who came late most."""
        return self._name_worst(self.blames)

    @cached_property
    def matrix(self) -> WaitMatrix:
        return wait_matrix(self.timeline, self.waits)

    @cached_property
    def graph(self) -> EventGraph:
        return build_graph(self.timeline)

    @cached_property
    def causes(self) -> Causes:
        return analyze_causes(self.timeline, self.every_wait, self.graph, self.window)

    @cached_property
    def culprit(self) -> Worst:
        """Who caused most of the waiting, by its own work and its host."""
        return self._name_worst(self.causes.blames)

    @cached_property
    def path(self) -> CriticalPath:
        return critical_path(self.timeline, self.every_wait, self.graph, self.window)

    @cached_property
    def hang(self) -> Hang | None:
        """Waits for other ranks that had not ended."""
        return find_hang(self.timeline)

    @property
    def absent(self) -> list[str]:
        """A line on ranks of the run that have no dump, and one on those left out."""
        return [problem.text for problem in self.timeline.problems if problem.kind in ABSENT_KINDS]

    @property
    def is_contradicted(self) -> bool:
        """Waits ended before what they waited for: nothing that is made of them is proven."""
        return any(problem.kind in CONTRADICTION_KINDS for problem in self.timeline.problems)

    @property
    def records_overwritten(self) -> int:
        """By a flight recorder: times are of what it kept, not of the run."""
        return sum(launch.records_overwritten for launch in self.timeline.launches)

    def _name_worst(self, blames: Sequence[Blame]) -> Worst:
        """Nothing is proven where ranks are absent, the one that is named may have waited for them, or where waits
        ended before their signals."""
        verdict = name_worst(blames)
        return replace(verdict, is_proven=False) if self.absent or self.is_contradicted else verdict


_WITHOUT_WAITS = ("balance", "summary", "time", "imbalances")
_OF_WAITS = ("causes", "path")


def analyze(timeline: Timeline, link_limit: LinkLimit | None = None, window: Window | None = None) -> Findings:
    """The Findings of a Timeline in ns, what takes long worked out already, on two cores."""
    findings = Findings(timeline, link_limit, window)
    with ThreadPoolExecutor(max_workers=1) as beside:
        without_waits = beside.submit(_work_out, findings, _WITHOUT_WAITS)
        _work_out(findings, _OF_WAITS)  # shares no answer with the others: none is worked out twice
        without_waits.result()
    return findings


def _work_out(findings: Findings, names: Sequence[str]) -> None:
    for name in names:
        getattr(findings, name)
