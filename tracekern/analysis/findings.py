"""Everything that `report` says about a capture, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tracekern.analysis.balance import Balance, LinkLimit, analyze_balance
from tracekern.analysis.causes.analyze import Causes, analyze_causes
from tracekern.analysis.critical_path.analyze import CriticalPath, critical_path
from tracekern.analysis.distribution import Distribution, distribute
from tracekern.analysis.doubt import Blame, Worst, blame_ranks, name_worst
from tracekern.analysis.gantt import ChosenSpans, choose_spans
from tracekern.analysis.hang import Hang, find_hang
from tracekern.analysis.imbalance import Imbalance, work_imbalance
from tracekern.analysis.iterations import Iterations, find_iterations
from tracekern.analysis.matrix import Abnormal, WaitMatrix, find_abnormal, wait_matrix
from tracekern.analysis.statistics import probe_cost_ns
from tracekern.analysis.summary import Summary, summarize
from tracekern.analysis.time_shares import TimeShares, share_time
from tracekern.analysis.waits.analyze import Waits, analyze_waits
from tracekern.analysis.waits.event_graph import build_graph
from tracekern.analysis.waits.statistics import WaitStatistic, wait_statistics
from tracekern.timeline.model import ABSENT_KINDS, CONTRADICTION_KINDS, Timeline
from tracekern.timeline.select import Window, reaches_into, select


@dataclass(frozen=True)
class Findings:
    timeline: Timeline
    """All of it. What a window chooses are the spans of `summary`, `time`, `balance` and `imbalances`, the iterations,
    the waits and what is made of these."""
    summary: Summary
    time: TimeShares
    iterations: Iterations
    gantts: tuple[ChosenSpans, ...]
    """The longest, the median and the shortest iteration; fewer where these are the same."""
    waits: Waits
    phases: tuple[WaitStatistic, ...]
    """Waits by phase, largest sum first."""
    distributions: tuple[Distribution, ...]
    """Of the phases with the largest sums."""
    blames: tuple[Blame, ...]
    verdict: Worst
    """Who came late most."""
    matrix: WaitMatrix
    abnormal: tuple[Abnormal, ...]
    causes: Causes
    culprit: Worst
    """Who caused most of the waiting, by its own work and its host."""
    path: CriticalPath
    balance: Balance
    imbalances: tuple[Imbalance, ...]
    hang: Hang | None
    """Waits for other ranks that had not ended."""
    probe_cost_ns: float
    """What recording one span adds, as the capture measured it; 0 where it did not."""

    @property
    def absent(self) -> list[str]:
        """A line on ranks of the run that have no dump, and one on those left out."""
        return _absent(self.timeline)

    @property
    def is_contradicted(self) -> bool:
        """Waits ended before what they waited for: nothing that is made of them is proven."""
        return _is_contradicted(self.timeline)

    @property
    def records_overwritten(self) -> int:
        """By a flight recorder: times are of what it kept, not of the run."""
        return sum(launch.records_overwritten for launch in self.timeline.launches)


MAX_DISTRIBUTIONS = 6


def find(timeline: Timeline, link_limit: LinkLimit | None = None, window: Window | None = None) -> Findings:
    """Runs every analysis on a Timeline in ns. What needs no waits is worked out beside the rest, on a second core.

    link_limit: GB/s that a link was measured to reach, as analyze_balance() takes it. window: says this of what reaches
    into it. Waits, iterations and hangs are worked out on the whole: what released a wait may lie outside.
    """
    with ThreadPoolExecutor(max_workers=1) as beside:
        plain = beside.submit(_find_plain, timeline, link_limit, window)
        iterations = find_iterations(timeline)
        iterations = iterations.take(reaches_into(window, iterations.start, iterations.end))
        rows = dict.fromkeys(reversed(iterations.best_median_worst())) if len(iterations) else {}
        every_wait = analyze_waits(timeline)
        waits = every_wait if window is None else _take_waits(timeline, every_wait, window)
        phases = wait_statistics(waits, by=("phase",))
        blames = blame_ranks(timeline, waits)
        matrix = wait_matrix(timeline, waits)
        graph = build_graph(timeline)
        causes = analyze_causes(timeline, every_wait, graph, window)
        return Findings(
            timeline=timeline,
            iterations=iterations,
            gantts=tuple(choose_spans(timeline, iterations, row) for row in rows),
            waits=waits,
            phases=phases,
            distributions=distribute(waits, [entry.phase for entry in phases[:MAX_DISTRIBUTIONS] if entry.phase]),
            blames=blames,
            verdict=_name_worst(timeline, blames),
            matrix=matrix,
            abnormal=find_abnormal(matrix),
            causes=causes,
            culprit=_name_worst(timeline, causes.blames),
            path=critical_path(timeline, every_wait, graph, window),
            **plain.result(),
        )


def _take_waits(timeline: Timeline, waits: Waits, window: Window) -> Waits:
    spans = timeline.spans
    return waits.take(np.flatnonzero(reaches_into(window, spans.start[waits.row], spans.end[waits.row])))


def _absent(timeline: Timeline) -> list[str]:
    return [problem.text for problem in timeline.problems if problem.kind in ABSENT_KINDS]


def _is_contradicted(timeline: Timeline) -> bool:
    return any(problem.kind in CONTRADICTION_KINDS for problem in timeline.problems)


def _name_worst(timeline: Timeline, blames: Sequence[Blame]) -> Worst:
    """Nothing is proven where ranks are absent, the one that is named may have waited for them, or where waits ended
    before their signals."""
    verdict = name_worst(blames)
    return replace(verdict, is_proven=False) if _absent(timeline) or _is_contradicted(timeline) else verdict


def _find_plain(timeline: Timeline, link_limit: LinkLimit | None, window: Window | None) -> dict[str, Any]:
    """Those fields of Findings that need no waits."""
    part = select(timeline, window)
    return {
        "balance": analyze_balance(part, link_limit),
        "summary": summarize(part),
        "time": share_time(part),
        "imbalances": work_imbalance(part),
        "hang": find_hang(timeline),
        "probe_cost_ns": probe_cost_ns(timeline),
    }
