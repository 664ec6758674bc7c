"""Every wait, taken apart: how much of it the sender was late, how much its stores took, and what is left.

A wait [b, e] is released by the signal [s0, s1] that arrived last. Before s0 the sender was not there yet (late), until
s1 its stores drained, and what is left the flag took to be seen. docs/analysis.md defines every quantity.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tracekern.analysis.groups import group_rows
from tracekern.analysis.waits import edges as wait_edges
from tracekern.errors import BadInput
from tracekern.timeline.facts.open_spans import endless_waits, known_ends
from tracekern.timeline.facts.roles import roles_of
from tracekern.timeline.facts.span_facts import named_peers
from tracekern.timeline.facts.stages import stages_of
from tracekern.timeline.intervals import one_line
from tracekern.timeline.join.flows import waits_for_nobody
from tracekern.timeline.model import (
    ChannelKind,
    EventClass,
    EventType,
    Flows,
    Int32,
    Int64,
    Mask,
    Spans,
    Timeline,
)
from tracekern.timeline.table import Table


def overtaken(group: Int64, begin: Int64, late_until: Int64, arrived: Int64) -> Int64:
    """[n] ns of [begin, late_until] after the first arrival of a message that a later wait of the same group takes.

    Rows are in the order in which the track waits, those of a group together or not. `arrived` is when the message of
    the row was there.
    """
    if np.all(group[1:] >= group[:-1]):
        return _overtaken(group, begin, late_until, arrived)
    order = np.argsort(group, kind="stable")
    result = np.empty(len(group), np.int64)
    result[order] = _overtaken(group[order], begin[order], late_until[order], arrived[order])
    return result


def _overtaken(group: Int64, begin: Int64, late_until: Int64, arrived: Int64) -> Int64:
    """The same where the rows of each group are adjacent."""
    first = np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(group)])
    if not len(first):
        return np.zeros(0, np.int64)
    to_line = one_line(group, begin, late_until)  # there one running minimum from the back serves all groups
    low = np.minimum.reduceat(begin, first)
    there = np.maximum(arrived, np.repeat(low, np.diff(first, append=len(group))))
    there += to_line
    # The row's own message is in this minimum too; it came too late to make a difference. So did those of later groups.
    earliest = np.minimum.accumulate(there[::-1])[::-1]
    np.maximum(earliest, begin + to_line, out=earliest)
    result: Int64 = np.maximum(late_until + to_line - earliest, 0)
    return result


Int8 = npt.NDArray[np.int8]


class Phase(NamedTuple):
    """Stage and event of a span."""

    stage: str
    """Name of the launch; empty for a span of no launch."""
    event: str

    def __str__(self) -> str:
        return f"{self.stage}.{self.event}" if self.stage else self.event


class WaitKind(enum.IntEnum):
    DATA = 0
    CREDIT = 1
    BARRIER = 2
    """A barrier of ranks, or of warps of a block or grid."""
    OPAQUE = 3
    """No channel, so that nothing on record says what it was for, or one that held what it wanted before any signal."""
    UNMATCHED = 4
    """It has a channel, but no signal was recorded, or its own begin was not."""


CLASSES = ("late_sender", "drain", "visibility", "late_receiver", "barrier_late", "completion", "unmatched")
"""The classes that every wait is divided into, without rest."""


@dataclass(frozen=True, repr=False)
class Waits(Table):
    """[n] columns, one row for each span of class WAIT that ended or is endless, in the order of Timeline.spans.

    Stored are three times that add up to `wait_ns`; what they are called depends on `kind`, and the properties named in
    CLASSES sort them out.
    """

    row: Int64
    """Index into Timeline.spans."""
    kind: Int8
    """A WaitKind."""
    signal: Int64
    """The signal span that released it, or the last to arrive at a barrier of ranks: index into Timeline.spans; -1."""
    last_arrival: Int64
    """At a block or grid barrier: the wait span of the warp that came last (maybe the row itself); -1."""
    rank: Int32
    peer: Int32
    """The rank waited for: source of the signal, last at the barrier, or named by the wait; -1 where unknown."""
    track: Int32
    role: Int32
    """Index into `roles`."""
    phase: Int32
    """Index into `phases`."""
    launch: Int32
    """Index into Timeline.launches; -1."""
    wait_ns: Int64
    endless: npt.NDArray[np.bool_]
    """It never ended: wait_ns is how long it lasted at least (timeline/open_spans.py), with the peer late all along."""
    headless: npt.NDArray[np.bool_]
    """A flight recorder overwrote its begin: it took longer than wait_ns."""
    late_ns: Int64
    """From the begin until the peer was there: late_sender, late_receiver or barrier_late."""
    drain_ns: Int64
    slack_ns: Int64
    """How long before the wait its signal had arrived. Not wait: time in hand."""
    wrong_order_ns: Int64
    """The part of late_sender during which another message was there that the track takes later in the same phase."""
    phases: tuple[Phase, ...]
    phase_numbers: tuple[int, ...]
    """[num_phases] of each the number that it has in all parts of the run, see PhaseNumbers."""
    roles: tuple[str, ...]
    arrivals: Flows
    """For waits at barriers of ranks: every arrival, not just the last."""
    num_open: int
    """Waits whose end is not on record: endless ones, and those whose end found no room, which have no row."""

    @property
    def late_sender(self) -> Int64:
        return self._where(WaitKind.DATA, self.late_ns)

    @property
    def late_receiver(self) -> Int64:
        return self._where(WaitKind.CREDIT, self.late_ns)

    @property
    def barrier_late(self) -> Int64:
        return self._where(WaitKind.BARRIER, self.late_ns)

    @property
    def drain(self) -> Int64:
        return self.drain_ns

    @property
    def visibility(self) -> Int64:
        return self._where(WaitKind.DATA, self.rest_ns) + self._where(WaitKind.CREDIT, self.rest_ns)

    @property
    def completion(self) -> Int64:
        return self._where(WaitKind.BARRIER, self.rest_ns) + self._where(WaitKind.OPAQUE, self.rest_ns)

    @property
    def unmatched(self) -> Int64:
        return self._where(WaitKind.UNMATCHED, self.rest_ns)

    @property
    def rest_ns(self) -> Int64:
        """What is neither late nor drain."""
        return self.wait_ns - self.late_ns - self.drain_ns

    def by_class(self) -> dict[str, Int64]:
        """CLASSES -> [n] ns. They add up to wait_ns, row by row."""
        return {name: getattr(self, name) for name in CLASSES}

    def totals(self) -> dict[str, int]:
        """CLASSES -> ns over all waits. They add up to the sum of wait_ns."""
        return {name: int(values.sum()) for name, values in self.by_class().items()}

    def take(self, which: Int64) -> Waits:
        """The waits that an ascending index array picks. `num_open` stays."""
        is_taken = np.zeros(len(self), bool)
        is_taken[which] = True
        kept = is_taken[np.searchsorted(self.row, self.arrivals.wait)]
        return dataclasses.replace(super().take(which), arrivals=self.arrivals.take(kept))

    def _where(self, kind: WaitKind, values: Int64) -> Int64:
        return np.where(self.kind == kind, values, 0)


def analyze_waits(timeline: Timeline) -> Waits:
    """Takes every wait of `timeline` apart, at the time stamps as they are; `doubt` says how far those can be trusted.

    Signals and waits are joined by `timeline.flows`. Raises BadInput for a Timeline in ticks.
    """
    if timeline.unit != "ns":
        raise BadInput(f"waits between ranks need one time axis in ns, got {timeline.unit}; use tracekern.load()")
    spans = timeline.spans
    is_wait = timeline.events_of(EventClass.WAIT)[spans.event]
    is_endless = endless_waits(timeline)
    row = np.flatnonzero(is_wait & (~spans.is_open | is_endless))
    endless = is_endless[row]
    arrivals = wait_edges.barrier_arrivals(timeline)
    signal, last_arrival = _releases(timeline, arrivals, row)
    kind = _kinds(timeline, row, signal, last_arrival, endless)
    begin, end = spans.start[row], known_ends(timeline)[row]
    done = wait_edges.signal_ends(timeline, signal)
    late, drain, slack = _divide(timeline, kind, begin, end, signal, last_arrival, done)
    late = np.where(endless & (kind != WaitKind.OPAQUE), end - begin, late)
    track = spans.track[row]
    launch = spans.launch[row]
    role, roles = roles_of(timeline, Spans(track=track, launch=launch))
    phase, phases, phase_numbers = number_phases(timeline, row)
    return Waits(
        row=row,
        kind=kind,
        signal=signal,
        last_arrival=last_arrival,
        rank=_rank_of(timeline, row),
        peer=_peers(timeline, row, signal, last_arrival),
        track=track,
        role=role,
        phase=phase,
        launch=launch,
        wait_ns=end - begin,
        endless=endless,
        headless=timeline.headless_spans()[row],
        late_ns=late,
        drain_ns=drain,
        slack_ns=slack,
        wrong_order_ns=_wrong_order(timeline, row, (kind == WaitKind.DATA) & ~endless, begin + late, done),
        phases=phases,
        phase_numbers=phase_numbers,
        roles=roles,
        arrivals=arrivals,
        num_open=int(np.count_nonzero(is_wait & spans.is_open)),
    )


class PhaseNumbers:
    """Numbers of the phases that a Timeline can have, in the order of their names."""

    def __init__(self, timeline: Timeline) -> None:
        stages = stages_of(timeline)
        self._stages = sorted({*stages.names, ""})
        self._names = sorted({event.name for event in timeline.events})
        stage = {name: number for number, name in enumerate(self._stages)}
        of_launch = [stage[stages.names[number]] for number in stages.of_launch.tolist()]
        self._of_launch = np.array([*of_launch, stage[""]], np.int32) * np.int32(len(self._names))
        name = {name: number for number, name in enumerate(self._names)}
        self._of_event = np.array([name[event.name] for event in timeline.events] or [0], np.int32)

    def of(self, spans: Spans, row: Int64) -> Int32:
        """[n] number of the phase of each span."""
        numbers: Int32 = self._of_launch[spans.launch[row]] + self._of_event[spans.event[row]]
        return numbers

    def __getitem__(self, number: int) -> Phase:
        stage, name = divmod(number, len(self._names))
        return Phase(self._stages[stage], self._names[name])


def number_phases(timeline: Timeline, row: Int64) -> tuple[Int32, tuple[Phase, ...], tuple[int, ...]]:
    """([n] index into the phases, the phases, [num_phases] their PhaseNumbers) of the spans `row`; only phases that
    occur, sorted by name."""
    numbers = PhaseNumbers(timeline)
    groups = group_rows(len(row), numbers.of(timeline.spans, row))
    found = tuple(groups.columns[0].tolist())
    return groups.group.astype(np.int32), tuple(numbers[number] for number in found), found


def _releases(timeline: Timeline, arrivals: Flows, row: Int64) -> tuple[Int64, Int64]:
    """([n] releasing signal, [n] last arrival at a block or grid barrier); -1 where there is none."""
    released = wait_edges.last_signals(timeline)
    local = wait_edges.local_barriers(timeline)
    is_barrier = np.array([*wait_edges.is_barrier(timeline), False], bool)[timeline.spans.event[row]]
    signal = np.where(is_barrier, -1, _of_rows(row, released.wait, released.signal))
    by_arrival = _of_rows(row, arrivals.wait, arrivals.signal)  # sorted by arrival: the last one written stays
    return np.where(by_arrival >= 0, by_arrival, signal), _of_rows(row, local.wait, local.last)


def _of_rows(row: Int64, wait: Int64, other: Int64) -> Int64:
    """[num_rows] what belongs to each row, which ascend; -1 where nothing does. wait, other: [n]."""
    found = np.full(len(row), -1, np.int64)
    place = np.searchsorted(row, wait)
    is_there = np.append(row, -1)[place] == wait
    found[place[is_there]] = other[is_there]
    return found


def _kinds(timeline: Timeline, row: Int64, signal: Int64, last_arrival: Int64, endless: Mask) -> Int8:
    of_channel = {
        ChannelKind.DATA: WaitKind.DATA,
        ChannelKind.COUNT: WaitKind.DATA,
        ChannelKind.IMMEDIATE: WaitKind.DATA,
        ChannelKind.CREDIT: WaitKind.CREDIT,
        ChannelKind.GROUP: WaitKind.OPAQUE,  # until it is known who came last
        ChannelKind.GRID: WaitKind.OPAQUE,
    }
    of_name = {event.name: event.channel for event in timeline.events if event.channel}

    def of(event: EventType) -> WaitKind:
        channel = of_name.get(event.name) if event.is_headless else event.channel  # the begin took the channel with it
        return of_channel.get(channel.kind, WaitKind.BARRIER) if channel else WaitKind.OPAQUE

    of_event = np.array([*map(of, timeline.events), WaitKind.OPAQUE], np.int8)
    kind = of_event[timeline.spans.event[row]]
    kind[waits_for_nobody(timeline)[row]] = WaitKind.OPAQUE
    kind[(kind == WaitKind.OPAQUE) & (last_arrival >= 0)] = WaitKind.BARRIER
    kind[(kind != WaitKind.OPAQUE) & (signal < 0) & (last_arrival < 0) & ~endless] = WaitKind.UNMATCHED
    return kind


def _divide(
    timeline: Timeline, kind: Int8, begin: Int64, end: Int64, signal: Int64, last_arrival: Int64, done: Int64
) -> tuple[Int64, Int64, Int64]:
    """([n] late, drain, slack)"""
    spans, wait_ns = timeline.spans, end - begin
    released = (signal >= 0) | (last_arrival >= 0)
    there = np.where(signal >= 0, spans.start[signal], spans.start[last_arrival])
    late = np.where(released, np.clip(there - begin, 0, wait_ns), 0)
    drains = (signal >= 0) & (kind != WaitKind.BARRIER)
    drain = np.where(drains, np.clip(done - begin, 0, wait_ns) - late, 0)
    slack = np.where(drains, np.maximum(begin - done, 0), 0)
    return late, drain, slack


def _wrong_order(timeline: Timeline, row: Int64, is_data: Mask, late_until: Int64, done: Int64) -> Int64:
    spans, result = timeline.spans, np.zeros(len(row), np.int64)
    data = np.flatnonzero(is_data)
    row = row[data]
    group = group_rows(len(row), spans.track[row], spans.launch[row], spans.event[row]).group
    result[data] = overtaken(group, spans.start[row], late_until[data], done[data])
    return result


def _rank_of(timeline: Timeline, row: Int64) -> Int32:
    return timeline.track_ranks()[timeline.spans.track[row]]


def _peers(timeline: Timeline, row: Int64, signal: Int64, last_arrival: Int64) -> Int32:
    """[n] the rank waited for."""
    peer = named_peers(timeline, row)
    peer[~np.isin(peer, [rank.rank for rank in timeline.ranks])] = -1
    for releaser in (signal, last_arrival):
        known = releaser >= 0
        peer[known] = _rank_of(timeline, releaser[known])
    return peer
