"""What a rank has at every moment, counted from its spans: messages under way to it, warps that wait, full slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tracekern.timeline.facts.rings import find_ring_steps
from tracekern.timeline.facts.stage_fill import find_stage_fills
from tracekern.timeline.intervals import unions
from tracekern.timeline.model import OPEN_END, ChannelKind, EventClass, Int64, Timeline, TrackKind

MAX_POINTS = 20_000
"""Limit of one counter. Viewers draw no more, and a trace of many waits must not grow by two points for each."""


@dataclass(frozen=True)
class Counter:
    """[n] columns: from `time` on (ns from the origin, rising) the counter is `value`."""

    rank: int
    name: str
    unit: str
    time: Int64
    value: Int64
    is_thinned: bool
    """The window was cut into MAX_POINTS cells, and each value is the largest of its cell."""

    def without_points(self) -> Counter:
        return replace(self, time=self.time[:0], value=self.value[:0])


@dataclass(frozen=True)
class CounterSteps:
    """[n] changes of a counter, in whatever order. Those of all parts of a run make it."""

    rank: int
    name: str
    unit: str
    place: tuple[int, int, str]
    """Among the counters of its rank; no two have the same."""
    time: Int64
    change: Int64

    @classmethod
    def of_stays(
        cls, rank: int, name: str, unit: str, place: tuple[int, int, str], begin: Int64, end: Int64
    ) -> CounterSteps:
        """One more at each begin, one less at each end."""
        change = np.concatenate([np.ones(len(begin), np.int64), -np.ones(len(end), np.int64)])
        return cls(rank, name, unit, place, np.concatenate([begin, end]), change)

    @property
    def order(self) -> tuple[int, tuple[int, int, str]]:
        """The counters are in ascending order."""
        return self.rank, self.place

    def counter(self) -> Counter:
        """Of all steps. A clock error that shows a step down first leaves 0."""
        return _accumulate(self.rank, self.name, self.unit, self.time, self.change)


def count_events(timeline: Timeline) -> tuple[Counter, ...]:
    """The counters of every rank that has them, in the order of the ranks. Ranks that never wait get none.

    `stalled warps`: device tracks inside a wait; a wait that never ended stays. `<channel> in flight`: signals for this
    rank that were sent and not yet received, for each data channel with a key, which is to say a message for each
    token; where there is none, for all data channels. Sent is the end of the signal, or its start where the waiter saw
    it before; received is the end of the first wait it released. Signals without a wait on record, those that a clock
    error shows after their wait, and those between ranks whose clocks are not aligned, are left out.
    `<tail> ring fill`: slots of the rank's rings that were filled and not given back, of all rings of a channel.
    `stage fill, block N`: slots of a block's ring of int4 experts that are full or on their way, where all its warps
    are on record step by step; 0 elsewhere.
    Of engines: `transfers queued`, from their submission to their first write; `bytes under way`, from there to the
    end of the transfer; `writes under way` in each domain.
    """
    return tuple(steps.counter() for steps in find_steps(timeline))


def find_steps(timeline: Timeline) -> list[CounterSteps]:
    """Those of a timeline that is a part of a run, or all of it, in order."""
    found = [
        *_stalled(timeline),
        *_in_flight(timeline),
        *_ring_fill(timeline),
        *_stage_fill(timeline),
        *_of_engines(timeline),
    ]
    return sorted(found, key=lambda steps: steps.order)


def _stalled(timeline: Timeline) -> list[CounterSteps]:
    spans = timeline.spans
    is_wait = timeline.events_of(EventClass.WAIT)
    is_device = timeline.tracks_of(TrackKind.DEVICE)
    chosen = np.flatnonzero(is_wait[spans.event] & is_device[spans.track])
    track, start, end = spans.track[chosen], spans.start[chosen], spans.end[chosen]
    never = np.zeros(len(timeline.tracks), np.int64)  # behind all waits of the track: other clocks may lie far off
    np.maximum.at(never, track, np.maximum(start, end) + 1)
    first, end = unions(track, start, np.where(end == OPEN_END, never[track], end))
    track, start = track[first], start[first]
    ended, rank_of = end < never[track], timeline.track_ranks()[track]
    counters = []
    for rank in np.unique(rank_of).tolist():
        own = rank_of == rank
        counters.append(CounterSteps.of_stays(rank, "stalled warps", "warps", (0, 0, ""), start[own], end[own & ended]))
    return counters


def _in_flight(timeline: Timeline) -> list[CounterSteps]:
    spans, signal, wait = timeline.spans, timeline.flows.signal, timeline.flows.wait
    of_event = _channel_names(timeline)
    names = sorted(set(of_event) - {""})
    channel_of = np.array([names.index(name) if name else -1 for name in of_event] or [-1])[spans.event[signal]]
    rank_of_track = timeline.track_ranks()
    chosen = channel_of >= 0
    if not timeline.aligned:
        chosen &= rank_of_track[spans.track[signal]] == rank_of_track[spans.track[wait]]
    signal, wait, channel_of = signal[chosen], wait[chosen], channel_of[chosen]
    order = np.lexsort((spans.end[wait], signal))
    first = order[np.append(True, np.diff(signal[order]) != 0)[: len(order)]]  # of a signal's waits, the first to end
    received = spans.end[wait[first]]
    sent_end = spans.end[signal[first]]
    is_early = (sent_end == OPEN_END) | (sent_end >= received)
    sent = np.where(is_early, spans.start[signal[first]], sent_end)
    rank_of = rank_of_track[spans.track[wait[first]]]
    counters = []
    for rank in np.unique(rank_of).tolist():
        for channel, name in enumerate(names):
            own = (rank_of == rank) & (channel_of[first] == channel) & (sent < received)
            if own.any():
                counters.append(
                    CounterSteps.of_stays(rank, f"{name} in flight", "messages", (1, 0, name), sent[own], received[own])
                )
    return counters


def _channel_names(timeline: Timeline) -> list[str]:
    """The channel to count of each event; empty for none."""
    channels = [event.channel for event in timeline.events]
    data = [channel if channel and channel.kind == ChannelKind.DATA else None for channel in channels]
    has_tokens = any(channel and channel.key for channel in data)
    return [channel.name if channel and (channel.key or not has_tokens) else "" for channel in data]


def _ring_fill(timeline: Timeline) -> list[CounterSteps]:
    counters = []
    for steps in find_ring_steps(timeline):
        for rank in np.unique(steps.receiver).tolist():
            own = steps.receiver == rank
            name = f"{steps.channel.tail} ring fill"
            counters.append(
                CounterSteps(rank, name, "slots", (2, 0, steps.channel.name), steps.time[own], steps.change[own])
            )
    return counters


def _stage_fill(timeline: Timeline) -> list[CounterSteps]:
    of_block: dict[tuple[int, int], list[tuple[Int64, Int64]]] = {}
    for fill in find_stage_fills(timeline):
        change = np.diff(fill.value, prepend=0)
        of_block.setdefault((fill.rank, fill.block), []).append((fill.time, change))
    counters = []
    for (rank, block), fills in sorted(of_block.items()):
        time, change = (np.concatenate(columns) for columns in zip(*fills, strict=True))
        counters.append(CounterSteps(rank, f"stage fill, block {block}", "slots", (3, block, ""), time, change))
    return counters


_QUEUED, _TRANSFER, _WRITES = "queued", "transfer", ("write", "write_imm")
"""Events of csrc/fabric/events.h."""


def _of_engines(timeline: Timeline) -> list[CounterSteps]:
    spans, ranks = timeline.spans, timeline.track_ranks()
    is_engine = timeline.tracks_of(TrackKind.ENGINE)
    rows = np.flatnonzero(is_engine[spans.track] & (spans.end != OPEN_END))
    names = np.array([event.name for event in timeline.events] or [""])[spans.event[rows]]
    roles = np.array([track.role for track in timeline.tracks] or [""])[spans.track[rows]]
    counters = []
    for rank in np.unique(ranks[spans.track[rows]]).tolist():
        own = ranks[spans.track[rows]] == rank
        queued, whole = rows[own & (names == _QUEUED)], rows[own & (names == _TRANSFER)]
        if len(queued) and len(queued) == len(whole):  # each lies within its transfer, both in the order of tracks
            counters.append(
                CounterSteps.of_stays(
                    rank, "transfers queued", "transfers", (4, 0, ""), spans.start[queued], spans.end[queued]
                )
            )
            num_bytes = timeline.field(whole, "bytes")
            times = np.concatenate([spans.end[queued], spans.end[whole]])
            steps = np.concatenate([num_bytes, -num_bytes])
            counters.append(CounterSteps(rank, "bytes under way", "bytes", (4, 1, ""), times, steps))
        for domain in sorted(set(roles[own & np.isin(names, _WRITES)].tolist())):
            writes = rows[own & (roles == domain)]
            counters.append(
                CounterSteps.of_stays(
                    rank,
                    f"writes under way, {domain}",
                    "writes",
                    (4, 2, domain),
                    spans.start[writes],
                    spans.end[writes],
                )
            )
    return counters


def _accumulate(rank: int, name: str, unit: str, times: Int64, step: Int64) -> Counter:
    time, place = np.unique(times, return_inverse=True)
    change = np.zeros(len(time), np.int64)
    np.add.at(change, place, step)
    value = np.maximum(np.cumsum(change), 0)
    changed = np.append(True, np.diff(value) != 0)
    time, value = time[changed], value[changed]
    if len(time) <= MAX_POINTS:
        return Counter(rank, name, unit, time, value, False)
    # The last point stays as it is: all cells end before it.
    cell_ns = -((time[0] - time[-1]) // (MAX_POINTS - 1))
    cell = (time[:-1] - time[0]) // cell_ns
    first = np.flatnonzero(np.append(True, np.diff(cell) != 0))
    # A cell begins with what the one before it ended with.
    peak = np.maximum(np.maximum.reduceat(value[:-1], first), np.append(0, value[first[1:] - 1]))
    return Counter(rank, name, unit, np.append(time[first], time[-1]), np.append(peak, value[-1]), True)
