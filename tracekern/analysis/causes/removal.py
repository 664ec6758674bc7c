"""What takes longer than at its peers, and would not: the work of a rank, the gaps before its kernels, a link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tracekern.analysis.causes.blame import Target
from tracekern.analysis.causes.charges import Cost
from tracekern.analysis.causes.history import bisect_right
from tracekern.analysis.critical_path.event_replay import Change, link_times
from tracekern.analysis.critical_path.path import Nodes
from tracekern.analysis.groups import Groups, group_rows, median_of_groups
from tracekern.analysis.waits.analyze import Waits
from tracekern.analysis.waits.event_graph import EventGraph
from tracekern.analysis.waits.pieces import is_message
from tracekern.timeline.model import Float64, Int64, Mask, Timeline

_STANDARD_ERRORS = 4
"""By so many something has to take longer than at its peers: what chance made longer is no cause to take out."""


@dataclass(frozen=True)
class Subject:
    """What is taken out at once."""

    target: Target
    """WORK, GAP (with what is the host's) or LINK."""
    rank: int
    peer: int
    """Of LINK; -1."""

    @classmethod
    def of(cls, cost: Cost) -> Subject | None:
        """None of what cannot be taken out."""
        if cost.target in (Target.HOST, Target.GAP):
            return cls(Target.GAP, cost.rank, -1)
        if cost.target is Target.WORK or (cost.target is Target.LINK and cost.peer >= 0):
            return cls(cost.target, cost.rank, cost.peer)
        return None


@dataclass(frozen=True)
class Removal:
    """By how much everything is shorter."""

    of_piece: Float64
    """[num_pieces] ns of each piece of activity."""
    ahead: Float64
    """[num_runs] ns before the first record."""
    link: Float64
    """[num_nodes] factor on the link's time of a wait."""
    gap: Float64
    """[num_launches] ns of the gap before each."""

    def until(self, graph: EventGraph, run: Int64, time: Int64) -> Float64:
        """[n] ns saved by each run by a time in it."""
        runs, activity = graph.runs, graph.activity
        first = runs.first[run]
        piece = np.maximum(bisect_right(activity.start, first, runs.stop[run], time) - 1, first)
        length = activity.end[piece] - activity.start[piece]
        part = np.clip(time - activity.start[piece], 0, length) / np.maximum(length, 1)
        sums = np.append(0, np.cumsum(self.of_piece))
        saved: Float64 = self.ahead[run] + sums[piece] - sums[first] + self.of_piece[piece] * part
        return saved

    def change(self, graph: EventGraph, nodes: Nodes) -> Change:
        """Returns it as a replay takes it."""
        every = np.arange(len(graph.runs))
        in_run = self.until(graph, every, graph.runs.end)
        return Change(self.until(graph, nodes.run, nodes.begin), in_run, self.link, self.gap)


class Peers:
    """What each piece of activity, gap and message would take if it were as long as at its peers."""

    def __init__(self, timeline: Timeline, graph: EventGraph, waits: Waits, nodes: Nodes) -> None:
        self._timeline, self._graph, self._waits, self._nodes = timeline, graph, waits, nodes
        self._num_ranks = len(timeline.ranks)
        self._length = graph.activity.end - graph.activity.start

    def without(self, subject: Subject, costs: Iterable[Cost]) -> Removal | None:
        """costs: those of the subject. None where it is no longer than at its peers, or has none."""
        if subject.target is Target.WORK:
            return self._work(subject.rank, [self._graph.phases.index(cost.phase) for cost in costs])
        if subject.target is Target.GAP:
            return self._gaps(subject.rank)
        return self._link(subject.rank, subject.peer)

    def _excess(self, longer: Float64, kind: Int64, is_mine: Mask) -> Float64 | None:
        """What to take from each of the times that are mine; None where they are not longer than at the peers, or there
        are none.

        longer: [n] ns by which pieces, gaps or messages are longer than at the peers: of the others that is chance.
        kind: [n] what is compared with each other.

        What all of a kind have in common is taken from each, so that they vary as they did, and from those that
        are far beyond that all of it. A kind that is shorter than at the peers stays as it is.
        """
        mine, others = longer[is_mine], longer[~is_mine]
        if not len(mine) or not len(others) or (self._num_ranks == 2 and len(mine) == 1):
            return None
        by_chance = mine.std(ddof=1) if self._num_ranks == 2 else np.sqrt((others**2).mean())
        tick_ns = max(rank.resolution_ticks / rank.ticks_per_second * 1e9 for rank in self._timeline.ranks)
        if mine.mean() <= max(_STANDARD_ERRORS * by_chance / len(mine) ** 0.5, tick_ns):
            return None
        num_kinds = int(kind.max()) + 1
        common = median_of_groups(kind[is_mine], mine, num_kinds)[kind[is_mine]]
        squares, count = (np.bincount(kind[~is_mine], values, num_kinds) for values in (others**2, None))
        spread = np.sqrt(squares / np.maximum(count, 1))[kind[is_mine]]
        return np.maximum(np.where(mine - common > _STANDARD_ERRORS * spread, mine, common), 0)

    def _removal(
        self,
        of_piece: Float64 | float = 0.0,
        ahead: Float64 | float = 0.0,
        link: Float64 | float = 1.0,
        gap: Float64 | float = 0.0,
    ) -> Removal:
        graph = self._graph
        sizes = len(graph.activity), len(graph.runs), len(self._nodes), len(graph.schedule.rank)
        values = zip((of_piece, ahead, link, gap), sizes, strict=True)
        return Removal(*(np.broadcast_to(value, size).astype(float) for value, size in values))

    def _work(self, rank: int, phases: list[int]) -> Removal | None:
        """The pieces of some phases as long as at the other ranks: in the same launch the same one of the same warp."""
        graph, runs = self._graph, self._graph.runs
        rank_of_run, warp = graph.schedule.rank[runs.launch], self._warp_of_runs
        run_of_piece = np.repeat(np.arange(len(runs)), runs.stop - runs.first)
        some = np.flatnonzero(np.isin(graph.phase, phases))
        run, phase = run_of_piece[some], graph.phase[some].astype(np.int64)
        alike = group_rows(len(some), warp[run], phase, _ordinals(run, phase))
        usual = self._as_at_others(alike, self._length[some], rank_of_run[run] == rank)
        before = runs.start - graph.schedule.start[runs.launch]
        usual_before = self._as_at_others(group_rows(len(runs), warp), before, rank_of_run == rank)
        not_started = graph.not_started[graph.schedule.stage[runs.launch]].astype(np.int64)
        of_stage = np.flatnonzero(np.isin(not_started, phases))

        is_mine = rank_of_run[np.concatenate([run, of_stage])] == rank
        longer = np.concatenate([self._length[some] - usual, (before - usual_before)[of_stage]])
        taken = self._excess(longer, np.concatenate([phase, not_started[of_stage]]), is_mine)
        if taken is None:
            return None
        of_piece, ahead = np.zeros(len(graph.activity)), np.zeros(len(runs))
        of_each = np.zeros(len(longer))
        of_each[is_mine] = taken
        of_piece[some], ahead[of_stage] = np.split(of_each, [len(some)])
        return self._removal(np.minimum(of_piece, self._length), ahead=np.minimum(ahead, before))

    @cached_property
    def _warp_of_runs(self) -> Int64:
        """[num_runs] a number for each warp of each launch, the same on all ranks."""
        runs, schedule = self._graph.runs, self._graph.schedule
        place = np.array([(track.block, track.warp) for track in self._timeline.tracks], np.int64).reshape(-1, 2)
        columns = (schedule.stage[runs.launch], schedule.sequence[runs.launch], *place[runs.track].T)
        return group_rows(len(runs), *columns).group

    def _as_at_others(self, alike: Groups, values: Int64, is_mine: Mask) -> Float64:
        """[n] the median over the other ranks of the values in each one's group; of two the lower one. What a rank has
        not counts as 0."""
        others = np.flatnonzero(~is_mine)
        group = alike.group[others]
        order = others[np.lexsort((values[others], group))]
        count = np.bincount(group, minlength=len(alike))
        first, missing = np.cumsum(count) - count, np.maximum(self._num_ranks - 1 - count, 0)
        place = (count + missing - 1) // 2 - missing
        some = np.flatnonzero(place >= 0)
        median = np.zeros(len(alike))
        median[some] = values[order[first[some] + place[some]]]
        return median[alike.group]

    def _gaps(self, rank: int) -> Removal | None:
        """The gaps before kernels as long as before the same kernels of the other ranks."""
        schedule = self._graph.schedule
        shown = schedule.order
        gap = schedule.start[shown] - schedule.gap_start[shown]
        alike = group_rows(len(shown), schedule.stage[shown], schedule.sequence[shown])
        is_mine = schedule.rank[shown] == rank
        median = median_of_groups(alike.group[~is_mine], gap[~is_mine], len(alike))[alike.group]
        known = np.flatnonzero(np.isfinite(median))
        taken = self._excess((gap - median)[known], schedule.stage[shown[known]].astype(np.int64), is_mine[known])
        if taken is None:
            return None
        mine = known[is_mine[known]]
        saved = np.zeros(len(schedule.rank))
        saved[shown[mine]] = np.clip((gap - median)[mine], 0, None)
        return self._removal(gap=saved)

    def _link(self, source: int, destination: int) -> Removal | None:
        """Messages that take no longer than usual on other links, and signals that drain no longer."""
        waits, nodes = self._waits, self._nodes
        node = np.flatnonzero(nodes.hears & is_message(waits, nodes.wait) & (waits.rank != waits.peer)[nodes.wait])
        wait, latency = nodes.wait[node], link_times(self._timeline, waits, nodes)[0][node]
        is_mine = (waits.peer[wait] == source) & (waits.rank[wait] == destination)
        is_near = self._timeline.on_same_node(waits.peer[wait], waits.rank[wait])
        kind = group_rows(len(node), self._timeline.spans.event[waits.row[wait]], is_near)
        of_others = ~is_mine & (latency > 0)
        usual = median_of_groups(kind.group[of_others], latency[of_others], len(kind))[kind.group]
        compared = np.flatnonzero(of_others | (is_mine & np.isfinite(usual) & (latency > 0)))
        taken = self._excess((latency - usual)[compared], kind.group[compared], is_mine[compared])
        if taken is None:
            return None
        mine = compared[is_mine[compared]]
        factor = np.ones(len(nodes))
        factor[node[mine]] = np.maximum(0, 1 - taken / latency[mine])

        return self._removal(self._drained(waits.signal[wait], is_mine), link=factor)

    def _drained(self, signal: Int64, is_mine: Mask) -> Float64:
        """[num_pieces] by how much those of the signals that are mine took longer than others of their phase."""
        activity, phase = self._graph.activity, self._graph.phase.astype(np.int64)
        sent = np.zeros((2, len(self._timeline.spans)), bool)
        sent[0, signal[is_mine]] = sent[1, signal[~is_mine]] = True
        mine, others = (np.flatnonzero(marked[activity.span]) for marked in sent)
        usual = median_of_groups(phase[others], self._length[others], len(self._graph.phases))[phase[mine]]
        longer = np.zeros(len(activity))
        longer[mine] = np.nan_to_num(np.maximum(self._length[mine] - usual, 0))
        return longer


def _ordinals(run: Int64, phase: Int64) -> Int64:
    """[n] how many rows of the same run and phase lie before each one; runs ascend."""
    order = np.lexsort((phase, run))
    place = np.arange(len(order))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (run[order][1:] != run[order][:-1]) | (phase[order][1:] != phase[order][:-1])
    ordinal = np.empty(len(order), np.int64)
    ordinal[order] = place - np.maximum.accumulate(np.where(is_first, place, 0))
    return ordinal
