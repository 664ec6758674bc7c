"""Joins signals to the waits they released: channels of the event tables become edges between spans.

Two ends meet when channel, key fields and epoch agree, and the ranks that they name: a signal knows its source, and
its destination where it has a field `peer`; a wait the reverse. A channel without `peer` on either side stays within a
rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.timeline.columns import order_by
from tracekern.timeline.facts.of_launches import once_for_launches
from tracekern.timeline.join.calls import CallKeys, append_digit, epochs_of_ends
from tracekern.timeline.join.immediates import join_immediates
from tracekern.timeline.join.members import number_members
from tracekern.timeline.join.misfits import Backwards, ChannelMisfits, Lacking, Misfits, Repeated
from tracekern.timeline.model import (
    OPEN_END,
    Channel,
    ChannelKind,
    EventClass,
    EventType,
    Flows,
    Int64,
    Mask,
    Problem,
    Timeline,
    clocks_of_ranks,
    field_values,
)

_PEER, _VALUE, _WANTED = "peer", "value", "wanted"
_ENDS = EventClass.SIGNAL, EventClass.WAIT


def join_flows(timeline: Timeline, every_barrier_signal: bool = False) -> tuple[Flows, tuple[Problem, ...]]:
    """Edges of all channels, sorted by wait, and what did not fit.

    `data`: the one signal of the key, the first where it was sent again. `credit`, `count`: the earliest signal whose
    `value` reaches the wait's `wanted`; none where the channel's initial value does. `barrier`: the last signal of the
    key to arrive, or all of them. Waits that never closed have no edge, nor have those of warps for each other.
    """
    flows, misfits = join_part(timeline, {}, every_barrier_signal)
    return flows, misfits.problems(timeline, find_astray(timeline, misfits.lacking))


def join_part(
    timeline: Timeline, calls: Mapping[Channel, CallKeys], every_barrier_signal: bool = False
) -> tuple[Flows, Misfits]:
    """The edges of a part of a run, sorted by wait, and what did not fit there.

    calls: what tells calls apart in the whole run, by channel; without, what does in this part.
    """
    found: list[tuple[Int64, Int64]] = []
    misfits: dict[Channel, ChannelMisfits] = {}
    for channel in paired_channels(timeline):
        ends = _Ends.of(timeline, channel, calls.get(channel))
        signal, wait = ends.join(timeline, every_barrier_signal)
        if channel.kind.has_levels:
            signal, wait = _possible(timeline, signal, wait)
        found.append((signal, wait))
        unmatched, lacking = _unmatched(timeline, ends, wait)
        misfits[channel] = ChannelMisfits(
            unmatched, lacking, ends.repeated(timeline), _backwards(timeline, ends, signal, wait)
        )
    write, wait, problems = join_immediates(timeline)
    found.append((write, wait))
    signal, wait = (np.concatenate(column) for column in zip(*found, strict=True))
    order = order_by(wait, signal)
    return Flows(signal[order], wait[order]), Misfits(misfits, problems)


def find_astray(timeline: Timeline, lacking: Mapping[Channel, Lacking]) -> dict[Channel, Mask]:
    """[n] for each channel, whether a part has signals of these keys, of whatever call."""
    return {channel: _is_signalled(timeline, channel, waits.key) for channel, waits in lacking.items()}


def paired_channels(timeline: Timeline) -> list[Channel]:
    """The channels whose signals and waits are joined by fields, in the order in which they are."""
    channels = {event.channel for event in timeline.events if event.channel and event.channel.kind.has_pairs}
    return sorted(channels, key=lambda one: (one.name, one.kind.value, one.key, one.initial, one.tail))


def calls_of(timeline: Timeline) -> dict[Channel, CallKeys]:
    """What tells calls apart, by channel, for all parts of a run. Adds up over its ranks."""
    found = {}
    for channel in paired_channels(timeline):
        sides = _Fields.of(timeline, channel).collect(timeline)
        found[channel] = CallKeys.of(timeline, *(sides[kind].row for kind in _ENDS))
    return found


def sent_signals(timeline: Timeline, waits: Int64) -> Int64:
    """[n] the closed signal on record that each of these open waits is for; -1 where none is, or none for sure.

    A barrier's is the last of as many as other waits on its channel took.
    """
    found = np.full(len(timeline.spans), -1, np.int64)
    channels = {timeline.events[idx].channel for idx in np.unique(timeline.spans.event[waits]).tolist()}
    for channel in channels:
        if channel is None or not channel.kind.has_pairs:
            continue
        signal, wait = _Ends.of(timeline, channel).join_open(timeline)
        found[wait] = signal
    return found[waits]


def waits_for_nobody(timeline: Timeline) -> npt.NDArray[np.bool_]:
    """[num_spans] waits that want no more than their channel holds before any signal."""
    found = np.zeros(len(timeline.spans), bool)
    for idx, event in enumerate(timeline.events):
        if event.channel and event.channel.kind.has_levels and event.event_class is EventClass.WAIT:
            row = np.flatnonzero(timeline.spans.event == idx)
            found[row] = values_of(timeline, row, _WANTED) <= event.channel.initial
    return found


@dataclass(frozen=True)
class _Side:
    """[n] spans that signal or wait on a channel, by start within a key."""

    row: Int64
    """Index into Timeline.spans."""
    level: Int64
    """Channels of kind credit or count: the value written or wanted."""
    closed: npt.NDArray[np.bool_]

    def beyond(self, level: int) -> _Side:
        """Those whose level is above this one."""
        above = self.level > level
        return _Side(self.row[above], self.level[above], self.closed[above])


@dataclass(frozen=True)
class _Fields:
    """Which events are the ends of a channel, and what tells them apart."""

    channel: Channel
    types: dict[EventClass, list[tuple[int, EventType]]]
    has_peer: dict[EventClass, bool]

    @classmethod
    def of(cls, timeline: Timeline, channel: Channel) -> _Fields:
        numbered = [(idx, event) for idx, event in enumerate(timeline.events) if event.channel == channel]
        types = {kind: [(idx, event) for idx, event in numbered if event.event_class is kind] for kind in _ENDS}
        has_peer = {kind: bool(own) and all(_names_peer(event) for _, event in own) for kind, own in types.items()}
        return cls(channel, types, has_peer)

    def collect(self, timeline: Timeline) -> dict[EventClass, _Side]:
        """Both sides, in the order of the spans. Waits that want what is there before any signal are none."""
        sides = {kind: _collect(timeline, kind, self.types[kind]) for kind in _ENDS}
        if self.channel.kind.has_levels:
            sides[EventClass.WAIT] = sides[EventClass.WAIT].beyond(self.channel.initial)
        return sides

    def columns(self, timeline: Timeline, kind: EventClass, rows: Int64) -> list[Int64]:
        """[n] each: ranks, communicator and key fields of spans of one side. Those that meet have equal ones."""
        local = not any(self.has_peer.values())
        own = timeline.track_ranks()[timeline.spans.track[rows]].astype(np.int64)
        peer = values_of(timeline, rows, _PEER) if self.has_peer[kind] else own
        source, destination = (own, peer) if kind is EventClass.SIGNAL else (peer, own)
        columns = [source] * (self.has_peer[EventClass.WAIT] or local)
        columns += [destination] * (self.has_peer[EventClass.SIGNAL] or local)
        columns += [number_members(timeline)[timeline.spans.launch[rows]]]
        return columns + [values_of(timeline, rows, name) for name in self.channel.key if name != _PEER]


@dataclass(frozen=True)
class _Ends:
    fields: _Fields
    calls: CallKeys
    signals: _Side
    waits: _Side
    signal_key: Int64
    wait_key: Int64
    """[n] numbers of 0 and more, equal where the ends can meet; ascending."""

    @property
    def channel(self) -> Channel:
        return self.fields.channel

    @classmethod
    def of(cls, timeline: Timeline, channel: Channel, calls: CallKeys | None = None) -> _Ends:
        fields = _Fields.of(timeline, channel)
        sides = fields.collect(timeline)
        calls = calls or CallKeys.of(timeline, *(sides[kind].row for kind in _ENDS))
        keys = _number_keys(timeline, fields, sides, calls)
        for kind, side in sides.items():
            order = order_by(keys[kind], timeline.spans.start[side.row])
            sides[kind], keys[kind] = _Side(side.row[order], side.level[order], side.closed[order]), keys[kind][order]
        signals, waits = sides[EventClass.SIGNAL], sides[EventClass.WAIT]
        return cls(fields, calls, signals, waits, keys[EventClass.SIGNAL], keys[EventClass.WAIT])

    def key_of(self, timeline: Timeline, kind: EventClass, row: int) -> tuple[int, ...]:
        """The key of one end, in the whole run: its order is that of `signal_key` and `wait_key`."""
        rows, none = np.array([row], np.int64), np.empty(0, np.int64)
        columns = [epochs_of_ends(timeline, rows, none, self.calls), *self.fields.columns(timeline, kind, rows)]
        return tuple(int(column[0]) for column in columns)

    def join(self, timeline: Timeline, every_barrier_signal: bool) -> tuple[Int64, Int64]:
        """(signal, wait) rows of all edges."""
        first, count = self._candidates()
        if self.channel.kind is ChannelKind.DATA:
            pick = self._pick_data(timeline, count)
        elif self.channel.kind.has_levels:
            pick = self._pick_level(first)
        elif every_barrier_signal:
            count[~self.waits.closed] = 0
            waits = np.repeat(np.arange(len(count)), count)
            pick = np.arange(len(waits)) - np.repeat(np.cumsum(count) - count, count)
            return self.signals.row[first[waits] + pick], self.waits.row[waits]
        else:
            pick = count - 1
        matched = (pick >= 0) & (pick < count) & self.waits.closed
        return self.signals.row[(first + pick)[matched]], self.waits.row[matched]

    def join_open(self, timeline: Timeline) -> tuple[Int64, Int64]:
        """(signal, wait) rows of waits that never closed, and of the signals that were sent to them all the same."""
        first, count = self._candidates()
        closed = self.waits.closed
        if self.channel.kind.has_levels:
            pick = self._pick_level(first)
        elif self.channel.kind is ChannelKind.BARRIER:
            pick = np.where((count > 0) & (count >= count[closed].max(initial=1)), count - 1, -1)
        else:
            # What the same track has taken already is not the signal of its next wait.
            of_track = self._keys_of_tracks(timeline)
            is_taken = np.isin(of_track, of_track[closed]) & (count == 1)
            is_sure = (count == 1) | self._takes_in_turn(of_track, count)[0]
            pick = np.where(is_sure & ~is_taken, self._pick_data(timeline, count), -1)
        known = (pick >= 0) & (pick < count) & ~closed
        signal, wait = (first + pick)[known], self.waits.row[known]
        is_sent = self.signals.closed[signal]
        return self.signals.row[signal[is_sent]], wait[is_sent]

    def _candidates(self) -> tuple[Int64, Int64]:
        """([n] the first signal of each wait's key, [n] how many there are)"""
        first = np.searchsorted(self.signal_key, self.wait_key, "left")
        return first, np.searchsorted(self.signal_key, self.wait_key, "right") - first

    def repeated(self, timeline: Timeline) -> Repeated | None:
        """Keys of `data` that were sent again, for which no track waited as often."""
        _, count = self._candidates()
        if self.channel.kind is not ChannelKind.DATA or not (count > 1).any():
            return None
        in_turn, _ = self._takes_in_turn(self._keys_of_tracks(timeline), count)
        again = np.unique(self.wait_key[(count > 1) & ~in_turn])
        if not len(again) or lossy_launches(timeline).any():
            return None
        row = self.signals.row[np.searchsorted(self.signal_key, again[:1])]
        event = timeline.events[int(timeline.spans.event[row[0]])]
        key = [(name, field_values(event, name, timeline.spans, row)) for name in self.channel.key]
        named = " ".join(f"{name} {values[0]}" for name, values in key if values is not None) or "the only one"
        track = int(timeline.spans.track[row[0]])
        return Repeated(
            len(again),
            self.key_of(timeline, EventClass.SIGNAL, int(row[0])),
            named,
            timeline.tracks[track].rank,
            track,
        )

    def _keys_of_tracks(self, timeline: Timeline) -> Int64:
        """[num_waits] numbers that are equal for waits of one track for one key"""
        return append_digit(self.wait_key, timeline.spans.track[self.waits.row].astype(np.int64))

    def _takes_in_turn(self, of_track: Int64, count: Int64) -> tuple[npt.NDArray[np.bool_], Int64]:
        """([num_waits] whether its track waits for the key as often as that was sent, [num_waits] ordinal there)"""
        _, group, number = np.unique(of_track, return_inverse=True, return_counts=True)
        order = np.argsort(group, kind="stable")
        ordinal = np.empty(len(group), np.int64)
        ordinal[order] = np.arange(len(group)) - np.repeat(np.cumsum(number) - number, number)
        return number[group] == count, ordinal

    def _pick_data(self, timeline: Timeline, count: Int64) -> Int64:
        """The first signal of the key serves all its waits. A track that waits for it as often as it was sent takes the
        signals in turn. Where signals are missing, the first of several may not be the first.
        """
        if not (count > 1).any():
            return count - 1
        in_turn, ordinal = self._takes_in_turn(self._keys_of_tracks(timeline), count)
        is_unsure = (count > 1) & lossy_launches(timeline).any()
        return np.where(in_turn, ordinal, np.where((count == 0) | is_unsure, -1, 0))

    def _pick_level(self, first: Int64) -> Int64:
        """Values only grow; the first that reaches what was wanted did it."""
        levels = np.concatenate([self.signals.level, self.waits.level])
        place = np.unique(levels, return_inverse=True)[1]  # a value may have 55 bits, its place has 32
        level, wanted = np.split(place, [len(self.signals.level)])
        reached = np.maximum.accumulate(self.signal_key << 32 | level)
        return np.searchsorted(reached, self.wait_key << 32 | wanted, "left") - first


def _collect(timeline: Timeline, kind: EventClass, types: Sequence[tuple[int, EventType]]) -> _Side:
    spans = timeline.spans
    row = np.concatenate([np.empty(0, np.int64), *(np.flatnonzero(spans.event == idx) for idx, _ in types)])
    level = values_of(timeline, row, _VALUE if kind is EventClass.SIGNAL else _WANTED)
    return _Side(row, level, spans.end[row] != OPEN_END)


def _number_keys(
    timeline: Timeline, fields: _Fields, sides: dict[EventClass, _Side], calls: CallKeys
) -> dict[EventClass, Int64]:
    """A number for each distinct (call, ranks, communicator, key fields), the same on both sides."""
    signal, wait = (sides[kind].row for kind in _ENDS)
    columns = [fields.columns(timeline, kind, sides[kind].row) for kind in _ENDS]
    packed = epochs_of_ends(timeline, signal, wait, calls)
    for pair in zip(*columns, strict=True):
        packed = append_digit(packed, np.concatenate(pair))
    if fields.channel.kind.has_levels:  # which take the other half of the bits
        packed = np.unique(packed, return_inverse=True)[1]
    return {EventClass.SIGNAL: packed[: len(signal)], EventClass.WAIT: packed[len(signal) :]}


def _names_peer(event: EventType) -> bool:
    """At its begin or, where it takes what comes first, at its end. A barrier waits for all, whomever its end names."""
    meets_all = event.channel is not None and event.channel.kind is ChannelKind.BARRIER
    return event.has(_PEER) or (not meets_all and any(field.name == _PEER for field in event.end_fields))


def values_of(timeline: Timeline, rows: Int64, field: str) -> Int64:
    """[n] values of a field, 0 where an event has none of that name."""
    values = np.zeros(len(rows), np.int64)
    event = timeline.spans.event[rows]
    found = np.flatnonzero(np.bincount(event, minlength=1)).tolist()
    if len(found) == 1 and (known := field_values(timeline.events[found[0]], field, timeline.spans, rows)) is not None:
        return known
    for idx in found:
        mine = np.flatnonzero(event == idx)
        known = field_values(timeline.events[idx], field, timeline.spans, rows[mine])
        if known is not None:
            values[mine] = known
    return values


def _unmatched(timeline: Timeline, ends: _Ends, matched: Int64) -> tuple[dict[int, int], Lacking | None]:
    """(rank -> closed waits without an edge, those of which no call's signals were looked at but their own's)"""
    is_matched = np.zeros(len(timeline.spans), np.bool_)
    is_matched[matched] = True
    is_left = ends.waits.closed & ~is_matched[ends.waits.row]
    rows = ends.waits.row[is_left]
    of_rank = timeline.track_ranks()[timeline.spans.track[rows]].astype(np.int64)
    ranks, counts = np.unique(of_rank, return_counts=True)
    unmatched = dict(zip(ranks.tolist(), counts.tolist(), strict=True))
    if lossy_launches(timeline).any():  # any signal of an earlier call would do
        return unmatched, None
    wanted = ends.wait_key[is_left]
    has_own = np.append(ends.signal_key, -1)[np.searchsorted(ends.signal_key, wanted)] == wanted
    columns = ends.fields.columns(timeline, EventClass.WAIT, rows[~has_own])
    return unmatched, Lacking(np.array(columns), of_rank[~has_own], np.ones(len(columns[0]), np.int64))


def _is_signalled(timeline: Timeline, channel: Channel, wanted: Int64) -> Mask:
    """[n] whether any signal has this key. wanted: [num_columns, n], as Lacking.key."""
    fields = _Fields.of(timeline, channel)
    signals = fields.collect(timeline)[EventClass.SIGNAL].row
    packed = np.zeros(len(signals) + wanted.shape[1], np.int64)
    for column, key in zip(fields.columns(timeline, EventClass.SIGNAL, signals), wanted, strict=True):
        packed = append_digit(packed, np.concatenate([column, key]))
    found: Mask = np.isin(packed[len(signals) :], packed[: len(signals)])
    return found


def _lossy_launches(timeline: Timeline) -> Mask:
    return np.array([launch.records_lost + launch.records_overwritten > 0 for launch in timeline.launches], bool)


def _stamp_errors_ns(timeline: Timeline) -> npt.NDArray[np.float64]:
    return np.array([launch.stamp_error_ns for launch in timeline.launches], np.float64)


lossy_launches = once_for_launches(_lossy_launches)
"""[num_launches] Returns whether records of it are missing."""
stamp_errors_ns = once_for_launches(_stamp_errors_ns)
"""[num_launches] Returns Launch.stamp_error_ns of each."""


def _possible(timeline: Timeline, signal: Int64, wait: Int64) -> tuple[Int64, Int64]:
    """The edges without those to a wait that was over before: there the signal that came was lost, of those on record
    a later one was the first that reached what was wanted."""
    is_lossy = lossy_launches(timeline)
    early, slack = _lead(timeline, signal, wait)
    kept = (early <= slack) | ~is_lossy[timeline.spans.launch[signal]]
    return signal[kept], wait[kept]


def _lead(timeline: Timeline, signal: Int64, wait: Int64) -> tuple[Int64, npt.NDArray[np.float64]]:
    """([n] by how many ns each wait ended before its signal began, [n] how many the clocks of both ranks leave open,
    and those of cores where they stamped an end)"""
    spans, rank_of_track = timeline.spans, timeline.track_ranks()
    early = spans.start[signal] - spans.end[wait]
    if not timeline.aligned or timeline.unit != "ns":
        return early, np.full(len(early), np.inf)
    source, destination = rank_of_track[spans.track[signal]], rank_of_track[spans.track[wait]]
    clock_of = clocks_of_ranks(timeline.ranks)
    hard = np.zeros(len(clock_of))
    for rank in timeline.ranks:
        hard[rank.rank] = rank.clock.hard_ns if rank.clock else 0.0
    slack = np.where(clock_of[source] == clock_of[destination], 0.0, hard[source] + hard[destination])
    stamp_error = stamp_errors_ns(timeline)
    for end in (signal, wait):
        slack += stamp_error[spans.launch[end]]
    return early, slack


def _backwards(timeline: Timeline, ends: _Ends, signal: Int64, wait: Int64) -> Backwards | None:
    early, slack = _lead(timeline, signal, wait)
    wrong = np.flatnonzero(early > slack)
    if not len(wrong):
        return None
    worst = wrong[np.argmax(early[wrong])]
    track = int(timeline.spans.track[wait[worst]])
    source, destination = (timeline.tracks[idx].rank for idx in (timeline.spans.track[signal[worst]], track))
    key = ends.key_of(timeline, EventClass.WAIT, int(wait[worst]))
    return Backwards(len(wrong), int(early[worst]), key, float(slack[worst]), source, destination, track)
