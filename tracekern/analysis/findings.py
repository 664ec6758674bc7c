"""What the questions of a report share: each is worked out when it is first asked for, and once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, replace
from functools import cached_property
from typing import Any

from tracekern.analysis.doubt import Blame, Worst, most_charged, name_worst
from tracekern.analysis.graph.moments import Moments, Recorded, find_moments
from tracekern.analysis.part import Part, SumsOfParts
from tracekern.analysis.parts import HeldParts, Parts
from tracekern.analysis.questions.balance import Balance, LinkLimit, analyze_balance
from tracekern.analysis.questions.group_waits import GroupWaits, longest_first
from tracekern.analysis.questions.hang import Death, Hang, find_deaths, find_hang
from tracekern.analysis.questions.held_up import HeldUp, find_held_up
from tracekern.analysis.questions.imbalance import Imbalance, work_imbalance
from tracekern.analysis.questions.nodes import NodeWaits
from tracekern.analysis.questions.overlap import RankThreads, StreamOverlap, stream_overlaps, thread_overlaps
from tracekern.analysis.questions.receive_matrix import ReceiveMatrix, receive_matrix
from tracekern.analysis.questions.recording import HostRecording, host_recording
from tracekern.analysis.questions.ring_steps import RingSteps, ring_steps
from tracekern.analysis.questions.stages import StageTimes, stage_times
from tracekern.analysis.questions.staging import Staging, staging
from tracekern.analysis.questions.summary import Summary, summarize
from tracekern.analysis.questions.time_shares import TimeShares
from tracekern.analysis.questions.transfer_blame import TransferBlames, blame_transfers
from tracekern.analysis.questions.transfers import TransferWaits, divide_transfer_waits
from tracekern.analysis.waits.analyze import Phase, PhaseNumbers, Waits
from tracekern.analysis.waits.distribution import Distribution, distribute
from tracekern.analysis.waits.full_rings import DryRing, FullRing, dry_rings, full_rings
from tracekern.analysis.waits.matrix import WaitMatrix
from tracekern.analysis.waits.ring_fill import RingFill, fullest_first
from tracekern.analysis.waits.statistics import WaitStatistic, WaitSums, WaitTotals
from tracekern.analysis.why.answer import Answer, explain, no_cost
from tracekern.analysis.why.chain import Chain, LongestWaits, find_chain
from tracekern.analysis.why.critical_path import CriticalPath, critical_path
from tracekern.formatting import duration, percent
from tracekern.machine import usable_cores
from tracekern.timeline.facts.iterations import Iterations, find_iterations
from tracekern.timeline.join.damage import damage_of
from tracekern.timeline.model import ABSENT_KINDS, CONTRADICTION_KINDS, Timeline
from tracekern.timeline.select import Window, reaches_into, select


@dataclass(eq=False)
class Findings:
    """Answers about a timeline, each computed when it is first used. Made by `tracekern.analyze()`.

    With a `window`, spans, iterations and waits that reach into it count. Waits, paths and hangs are computed on the
    whole timeline first: what released a wait may be outside the window. What causes cost is said of the whole alone.
    """

    timeline: Timeline
    """The whole timeline, in ns; of a run in windows what is not in them, and the lanes of launches."""
    link_limit: LinkLimit | None = None
    """GB/s that a link was measured to reach."""
    window: Window | None = None
    """Begin and end of the part that is judged, in ns from the origin. None: all of it."""
    windows: InitVar[Parts[Part] | None] = None
    """The parts of a run that is not in memory. None: all of it is one."""

    def __post_init__(self, windows: Parts[Part] | None) -> None:
        self.parts: Parts[Part] = windows or HeldParts([Part(self.timeline, self.window)])

    def __repr__(self) -> str:
        window = "" if self.window is None else f" from {duration(self.window[0])} to {duration(self.window[1])}"
        if time := vars(self).get("time"):  # worked out already
            window += f": {percent(time.wait.sum(), time.total.sum())} of the warps' time are waits"
        names = [name for name, value in vars(Findings).items() if isinstance(value, cached_property)]
        return f"Findings{window}\n  answers: {', '.join(names)}\n{self.timeline!r}"

    @property
    def part(self) -> Part:
        return self.parts[0]

    @cached_property
    def sums(self) -> Mapping[str, Any]:
        """What the answers are made of, see part.py."""
        return SumsOfParts(self.parts)

    @cached_property
    def in_window(self) -> Timeline:
        """The part of the timeline in the window."""
        return self.part.in_window if len(self.parts) == 1 else select(self.timeline, self.window)

    @property
    def every_wait(self) -> Waits:
        """All waits of a run in memory, also those outside the window, and those that never ended."""
        return self.part.every_wait

    @property
    def waits(self) -> Waits:
        """The waits of a run in memory that reach into the window, each with its parts: late, drain and rest."""
        return self.part.waits

    @property
    def wait_totals(self) -> WaitTotals:
        """How many waits reach into the window, and how long they took."""
        totals: WaitTotals = self.sums["totals"]
        return totals

    def distributions(self, phases: Sequence[Phase]) -> tuple[Distribution, ...]:
        """How the waits of these phases are distributed; without those of start-up."""
        sums: WaitSums = self.sums["waits"]
        return distribute(sums.durations, PhaseNumbers(self.timeline), phases)

    def timeline_of_iteration(self, number: int) -> Timeline:
        """The part of the timeline that has the launches of an iteration."""
        is_in = find_iterations(self.timeline).of_launch == number
        return next(part.timeline for part in self.parts if (part.is_own & is_in).any())

    @cached_property
    def summary(self) -> Summary:
        """Spans, waits and losses of each rank."""
        return summarize(self.timeline, self.sums["counts"])

    @cached_property
    def time(self) -> TimeShares:
        """How the warps' time divides into work, waits and signals."""
        shares: TimeShares = self.sums["time"]
        return shares

    @cached_property
    def balance(self) -> Balance:
        """How evenly tokens and bytes are spread over ranks, experts and links."""
        return analyze_balance(self.timeline, self.link_limit, self.sums["balance"])

    @cached_property
    def imbalances(self) -> tuple[Imbalance, ...]:
        """How unevenly the work of each phase is spread over the ranks."""
        return work_imbalance(self.timeline, self.sums["work"])

    @cached_property
    def stages(self) -> StageTimes:
        """How long the kernels of each stage take on each rank, and for how much of that no warp works."""
        return stage_times(self.timeline, self.window, self.sums["idle"])

    @cached_property
    def overlap(self) -> tuple[StreamOverlap, ...]:
        """How long kernels of each stream ran beside those of others; () where no rank has several streams."""
        return stream_overlaps(self.in_window)

    @cached_property
    def threads(self) -> tuple[RankThreads, ...]:
        """How long ranges of each thread were open beside those of others; () where no rank has several threads."""
        return thread_overlaps(self.in_window)

    @cached_property
    def received(self) -> ReceiveMatrix | None:
        """What each expert received from each rank; None where no event tells."""
        return receive_matrix(self.timeline, self.sums["received"])

    @cached_property
    def staging(self) -> Staging | None:
        """How much of staging hides under the multiplication; None where no sweep is on record step by step."""
        return staging(self.timeline, self.sums["sweeps"])

    @cached_property
    def ring_steps(self) -> RingSteps | None:
        """What limits the rings of int4 experts; None where no tile of theirs is on record step by step."""
        return ring_steps(self.timeline, self.sums["tiles"])

    @cached_property
    def iterations(self) -> Iterations:
        """Begin and end of each iteration."""
        every = find_iterations(self.timeline)
        return every.take(reaches_into(self.window, every.start, every.end))

    @cached_property
    def phases(self) -> tuple[WaitStatistic, ...]:
        """Waits by phase, largest sum first."""
        sums: WaitSums = self.sums["waits"]
        return sums.statistics(PhaseNumbers(self.timeline), ())

    @cached_property
    def blames(self) -> tuple[Blame, ...]:
        """How much waiting each rank caused by coming late."""
        return most_charged(self.sums["charges"])

    @cached_property
    def verdict(self) -> Worst:
        """The rank that caused most of the waiting by coming late."""
        return self._name_worst(self.blames)

    @cached_property
    def matrix(self) -> WaitMatrix:
        """How long each rank waited for each other."""
        matrix: WaitMatrix = self.sums["matrix"]
        return matrix

    @cached_property
    def groups(self) -> tuple[GroupWaits, ...]:
        """How long the ranks of each group waited for each other; () where all kernels are of all ranks."""
        return longest_first(self.sums["groups"])

    @cached_property
    def nodes(self) -> NodeWaits | None:
        """How long ranks waited for those of their own node and of others; None where all are on one."""
        nodes: NodeWaits = self.sums["nodes"]
        return nodes if len(nodes.nodes) > 1 else None

    @cached_property
    def full_rings(self) -> tuple[FullRing, ...]:
        """Rings whose sender waited for room, the one that was full longest first."""
        return full_rings(self.timeline, self.sums["full_rings"])

    @cached_property
    def dry_rings(self) -> tuple[DryRing, ...]:
        """Rings whose receiver waited for something to come, the one that was dry longest first."""
        return dry_rings(self.timeline, self.sums["dry_rings"])

    @cached_property
    def ring_fills(self) -> tuple[RingFill, ...]:
        """How full rings were, those first that held most of their slots on average."""
        return fullest_first(self.sums["ring_slots"])

    @cached_property
    def transfers(self) -> TransferWaits | None:
        """The waits for immediates in the window, each with its parts; None without transfer engines."""
        return divide_transfer_waits(self.in_window)

    @cached_property
    def transfer_blames(self) -> TransferBlames | None:
        """Who held up these waits, and who stands out; None where no wait has its write on record."""
        return blame_transfers(self.transfers) if self.transfers is not None and len(self.transfers) else None

    @cached_property
    def recorded(self) -> Recorded:
        """What each warp did in each launch, and the launches of each stream in their order."""
        return Recorded.of(self.timeline, self.parts)

    @cached_property
    def recording(self) -> HostRecording | None:
        """Returns what recording takes of the time in which GPUs wait for their hosts; None where that is unknown."""
        return host_recording(self.timeline, self.recorded.schedule)

    @cached_property
    def moments(self) -> Moments | str:
        """What had to happen before what, and when it came; or why that is not known."""
        return find_moments(self.timeline, self.recorded)

    @cached_property
    def answer(self) -> Answer:
        """What costs the run time, by replays of it."""
        if self.held_up:
            return no_cost("the run did not end, and what a cause costs is said of runs that do")
        iterations = find_iterations(self.timeline)
        return explain(self.timeline, self.moments, self.sums["ended"], iterations, self.window)

    @cached_property
    def critical_path(self) -> CriticalPath:
        """The critical path."""
        return critical_path(self.timeline, self.moments, self.window)

    @cached_property
    def longest_waits(self) -> tuple[Chain, ...]:
        """The longest wait of each phase and why it lasted; none where no critical path is known.

        Those of start-up come last.
        """
        numbers = self.parts.beside(range(len(self.parts)))
        longest: LongestWaits = self.parts.map(LongestWaits.of, numbers).total()
        return self.chains([(wait.part, wait.row) for wait in longest.longest_first()])

    def chains(self, waits: Sequence[tuple[int, int]]) -> tuple[Chain, ...]:
        """Why each of these waits lasted. waits: the part of each, and the row of its spans."""
        moments = self.moments
        return () if isinstance(moments, str) else tuple(find_chain(moments, *wait) for wait in waits)

    @cached_property
    def hang(self) -> Hang | None:
        """The waits for other ranks that never ended; None where there are none."""
        return find_hang(self.timeline)

    @cached_property
    def deaths(self) -> tuple[Death, ...]:
        """Ranks that ended before they closed their captures, and what they did then."""
        return () if self.damage else find_deaths(self.timeline)

    @cached_property
    def held_up(self) -> HeldUp | None:
        """Why the run did not end; None where it did, or still runs."""
        return find_held_up(self.timeline, None if self.damage else self.hang)

    @property
    def damage(self) -> str:
        """Why no figure can be built on the times of this timeline; "" where they can be."""
        return damage_of(self.timeline)

    @property
    def absent(self) -> list[str]:
        """Lines about ranks of the run without a dump, and about ranks that were not selected."""
        return [problem.text for problem in self.timeline.problems if problem.kind in ABSENT_KINDS]

    @property
    def is_contradicted(self) -> bool:
        """Whether waits ended before what they waited for. Then nothing that follows from them is proven."""
        return any(problem.kind in CONTRADICTION_KINDS for problem in self.timeline.problems)

    @property
    def records_overwritten(self) -> int:
        """Number of records that a flight recorder overwrote. Times then cover what it kept, not the whole run."""
        return sum(launch.records_overwritten for launch in self.timeline.launches)

    def _name_worst(self, blames: Sequence[Blame]) -> Worst:
        """Nothing is proven where ranks are absent, the one that is named may have waited for them, or where waits
        ended before their signals."""
        verdict = name_worst(blames)
        return replace(verdict, is_proven=False) if self.absent or self.is_contradicted else verdict


_WITHOUT_WAITS = ("balance", "summary", "time", "stages", "imbalances")
_OF_WAITS = ("critical_path", "answer")


def analyze(timeline: Timeline, link_limit: LinkLimit | None = None, window: Window | None = None) -> Findings:
    """Answers who waited for whom, and why.

    Args:
        timeline: What `load()` returned.
        link_limit: GB/s that a link was measured to reach, for judging how busy links were.
        window: Begin and end of the part to judge, in ns from the timeline's origin.

    Returns:
        The findings, with the slow ones computed already, on two cores where there are two; none where the times are
        damaged.
    """
    findings = Findings(timeline, link_limit, window)
    if findings.damage:
        return findings
    if usable_cores() < 2:  # beside each other they would only take more memory
        _work_out(findings, (*_WITHOUT_WAITS, *_OF_WAITS))
        return findings
    with ThreadPoolExecutor(max_workers=1) as beside:
        without_waits = beside.submit(_work_out, findings, _WITHOUT_WAITS)
        _work_out(findings, _OF_WAITS)  # shares no answer with the others: none is worked out twice
        without_waits.result()
    return findings


def _work_out(findings: Findings, names: Sequence[str]) -> None:
    for name in names:
        getattr(findings, name)
