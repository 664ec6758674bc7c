"""Joins signals to the waits they released: channels of the event tables become edges between spans.

Two ends meet when channel, key fields and epoch agree, and the ranks that they name: a signal knows its source, and
its destination where it has a field `peer`; a wait the reverse. A channel without `peer` on either side stays within a
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.formatting import count as how_many
from tracekern.formatting import duration
from tracekern.timeline.columns import order_by
from tracekern.timeline.join.immediates import join_immediates
from tracekern.timeline.join.members import number_members
from tracekern.timeline.model import (
    OPEN_END,
    Channel,
    ChannelKind,
    EventClass,
    EventType,
    Flows,
    Int64,
    Problem,
    Timeline,
    clocks_of_ranks,
    field_values,
)

_PEER, _VALUE, _WANTED = "peer", "value", "wanted"

_ASTRAY = (
    "; {} of those would have one in a launch of another epoch or number: "
    "where the key tells calls apart, give all launches one epoch, launch(..., epoch=1)"
)


def join_flows(timeline: Timeline, every_barrier_signal: bool = False) -> tuple[Flows, tuple[Problem, ...]]:
    """Edges of all channels, sorted by wait, and what did not fit.

    `data`: the one signal of the key, the first where it was sent again. `credit`, `count`: the earliest signal whose
    `value` reaches the wait's `wanted`; none where the channel's initial value does. `barrier`: the last signal of the
    key to arrive, or all of them. Waits that never closed have no edge, nor have those of warps for each other.
    """
    channels = {event.channel for event in timeline.events if event.channel and event.channel.kind.has_pairs}
    found: list[tuple[Int64, Int64]] = []
    problems: list[Problem] = []
    for channel in sorted(channels, key=lambda one: (one.name, one.kind.value, one.key)):
        ends = _Ends.of(timeline, channel)
        signal, wait = ends.join(timeline, every_barrier_signal)
        if channel.kind.has_levels:
            signal, wait = _possible(timeline, signal, wait)
        found.append((signal, wait))
        problems += _unmatched(timeline, ends, wait)
        problems += ends.duplicates(timeline)
        problems += _backwards(timeline, channel, signal, wait)
    write, wait, unmatched = join_immediates(timeline)
    found.append((write, wait))
    problems += unmatched
    signal, wait = (np.concatenate(column) for column in zip(*found, strict=True))
    order = order_by(wait, signal)
    return Flows(signal[order], wait[order]), tuple(problems)


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
class _Ends:
    channel: Channel
    signals: _Side
    waits: _Side
    signal_key: Int64
    wait_key: Int64
    """[n] numbers of 0 and more, equal where the ends can meet; ascending."""

    @classmethod
    def of(cls, timeline: Timeline, channel: Channel, of_any_epoch: bool = False) -> _Ends:
        numbered = [(idx, event) for idx, event in enumerate(timeline.events) if event.channel == channel]
        types = {
            kind: [(idx, event) for idx, event in numbered if event.event_class is kind]
            for kind in (EventClass.SIGNAL, EventClass.WAIT)
        }
        sides = {kind: _collect(timeline, kind, types[kind]) for kind in types}
        if channel.kind.has_levels:
            sides[EventClass.WAIT] = sides[EventClass.WAIT].beyond(channel.initial)
        keys = _number_keys(timeline, channel, types, sides, of_any_epoch)
        for kind, side in sides.items():
            order = order_by(keys[kind], timeline.spans.start[side.row])
            sides[kind], keys[kind] = _Side(side.row[order], side.level[order], side.closed[order]), keys[kind][order]
        signals, waits = sides[EventClass.SIGNAL], sides[EventClass.WAIT]
        return cls(channel, signals, waits, keys[EventClass.SIGNAL], keys[EventClass.WAIT])

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

    def duplicates(self, timeline: Timeline) -> list[Problem]:
        """One warning where keys of `data` were sent again, for which no track waited as often."""
        _, count = self._candidates()
        if self.channel.kind is not ChannelKind.DATA or not (count > 1).any():
            return []
        in_turn, _ = self._takes_in_turn(self._keys_of_tracks(timeline), count)
        again = np.unique(self.wait_key[(count > 1) & ~in_turn])
        if not len(again) or lossy_launches(timeline).any():
            return []
        row = self.signals.row[np.searchsorted(self.signal_key, again[:1])]
        event = timeline.events[int(timeline.spans.event[row[0]])]
        key = [(name, field_values(event, name, timeline.spans, row)) for name in self.channel.key]
        named = " ".join(f"{name} {values[0]}" for name, values in key if values is not None) or "the only one"
        track = int(timeline.spans.track[row[0]])
        rank = timeline.tracks[track].rank
        text = (
            f"channel {self.channel.name}: {how_many(len(again), 'key')} signalled more than once, such as {named} by "
            f"rank {rank}; waits are joined to the first signal"
        )
        return [Problem("warning", "duplicate_signal", rank, track, text, len(again))]

    def _keys_of_tracks(self, timeline: Timeline) -> Int64:
        """[num_waits] numbers that are equal for waits of one track for one key"""
        return _append_digit(self.wait_key, timeline.spans.track[self.waits.row].astype(np.int64))

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
    timeline: Timeline,
    channel: Channel,
    types: dict[EventClass, list[tuple[int, EventType]]],
    sides: dict[EventClass, _Side],
    of_any_epoch: bool,
) -> dict[EventClass, Int64]:
    """A number for each distinct (ranks, communicator, key fields, epoch), the same on both sides; of any epoch without
    the last."""
    has_peer = {kind: bool(events) and all(_names_peer(event) for _, event in events) for kind, events in types.items()}
    local = not any(has_peer.values())
    use_source = has_peer[EventClass.WAIT] or local
    use_destination = has_peer[EventClass.SIGNAL] or local
    columns: dict[EventClass, list[Int64]] = {}
    members = number_members(timeline)
    for kind, side in sides.items():
        own = timeline.track_ranks()[timeline.spans.track[side.row]].astype(np.int64)
        peer = values_of(timeline, side.row, _PEER) if has_peer[kind] else own
        source, destination = (own, peer) if kind is EventClass.SIGNAL else (peer, own)
        columns[kind] = [source] * use_source + [destination] * use_destination
        columns[kind] += [members[timeline.spans.launch[side.row]]]
        columns[kind] += [values_of(timeline, side.row, name) for name in channel.key if name != _PEER]
    num_signals = len(sides[EventClass.SIGNAL].row)
    packed = epochs_of_ends(timeline, sides[EventClass.SIGNAL].row, sides[EventClass.WAIT].row)
    if of_any_epoch:
        packed = np.zeros_like(packed)
    for signal_column, wait_column in zip(columns[EventClass.SIGNAL], columns[EventClass.WAIT], strict=True):
        packed = _append_digit(packed, np.concatenate([signal_column, wait_column]))
    if channel.kind.has_levels:  # which take the other half of the bits
        packed = np.unique(packed, return_inverse=True)[1]
    return {EventClass.SIGNAL: packed[:num_signals], EventClass.WAIT: packed[num_signals:]}


def _names_peer(event: EventType) -> bool:
    """At its begin or, where it takes what comes first, at its end. A barrier waits for all, whomever its end names."""
    meets_all = event.channel is not None and event.channel.kind is ChannelKind.BARRIER
    return event.has(_PEER) or (not meets_all and any(field.name == _PEER for field in event.end_fields))


def _append_digit(packed: Int64, digit: Int64) -> Int64:
    """A number that tells (packed, digit) apart, kept small enough for the next digit."""
    digit = digit - digit.min(initial=0)
    base = int(digit.max(initial=0)) + 1
    if int(packed.max(initial=0)) >= (1 << 62) // base:
        packed = np.unique(packed, return_inverse=True)[1].astype(np.int64)
        if int(packed.max(initial=0)) >= (1 << 62) // base:
            digit = np.unique(digit, return_inverse=True)[1].astype(np.int64)
            base = int(digit.max(initial=0)) + 1
    return packed * base + digit


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


def epochs_of_ends(timeline: Timeline, signal: Int64, wait: Int64) -> Int64:
    """[n] number of the epoch of the launch of each span, signals first.

    Launches that know no epochs are told apart by their sequence number, and those of a graph, named `graph/launch` and
    counted anew, from all others, where both ends of the channel are in that graph.
    """
    signal_launch, wait_launch = timeline.spans.launch[signal], timeline.spans.launch[wait]
    of_launch = np.concatenate([signal_launch, wait_launch])
    epochs = np.array([launch.epoch for launch in timeline.launches], np.int64)
    if not epochs[of_launch].any():
        epochs = np.array([launch.sequence for launch in timeline.launches], np.int64)
        names = [launch.name.rpartition("/")[0] for launch in timeline.launches]
        graph = np.unique(np.array(names, str), return_inverse=True)[1]
        is_whole = np.isin(graph, np.intersect1d(graph[signal_launch], graph[wait_launch]))
        epochs = _append_digit(np.unique(epochs, return_inverse=True)[1], np.where(is_whole, graph + 1, 0))
    number: Int64 = np.unique(epochs, return_inverse=True)[1].astype(np.int64)[of_launch]
    return number


def _unmatched(timeline: Timeline, ends: _Ends, matched: Int64) -> list[Problem]:
    is_matched = np.zeros(len(timeline.spans), np.bool_)
    is_matched[matched] = True
    rows = ends.waits.row[ends.waits.closed]
    rows = rows[~is_matched[rows]]
    of_rank = timeline.track_ranks()[timeline.spans.track[rows]]
    ranks, counts = np.unique(of_rank, return_counts=True)
    is_astray = _has_signal_of_other_epoch(timeline, ends, rows)
    astray = [int((is_astray & (of_rank == rank)).sum()) for rank in ranks]
    # A flight recorder may have kept the wait and overwritten the signal.
    expected = any(launch.records_overwritten for launch in timeline.launches)
    return [
        Problem(
            "note" if expected else "warning",
            "unmatched_wait",
            rank,
            -1,
            f"rank {rank}: no signal on record of {how_many(number, 'wait')} on channel {ends.channel.name}"
            + (_ASTRAY.format(f"{other:,}") if other else ""),
            number,
        )
        for rank, number, other in zip(ranks.tolist(), counts.tolist(), astray, strict=True)
    ]


def lossy_launches(timeline: Timeline) -> npt.NDArray[np.bool_]:
    """[num_launches] whether records of it are missing"""
    return np.array([launch.records_lost + launch.records_overwritten > 0 for launch in timeline.launches], bool)


def _has_signal_of_other_epoch(timeline: Timeline, ends: _Ends, rows: Int64) -> npt.NDArray[np.bool_]:
    """[n] whether a wait without a signal would have one, did the launches' epochs not differ. Not asked where records
    are gone: any signal of an earlier call would do."""
    if not len(rows) or lossy_launches(timeline).any():
        return np.zeros(len(rows), np.bool_)
    of_any = _Ends.of(timeline, ends.channel, of_any_epoch=True)
    has_own = ends.waits.row[np.isin(ends.wait_key, ends.signal_key)]
    return np.isin(rows, of_any.waits.row[np.isin(of_any.wait_key, of_any.signal_key)]) & ~np.isin(rows, has_own)


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
    stamp_error = np.array([launch.stamp_error_ns for launch in timeline.launches], np.float64)
    for end in (signal, wait):
        slack += stamp_error[spans.launch[end]]
    return early, slack


def _backwards(timeline: Timeline, channel: Channel, signal: Int64, wait: Int64) -> list[Problem]:
    """Waits that ended before their signal began, by more than the clocks of both ranks leave open."""
    early, slack = _lead(timeline, signal, wait)
    wrong = np.flatnonzero(early > slack)
    if not len(wrong):
        return []
    worst = wrong[np.argmax(early[wrong])]
    track = int(timeline.spans.track[wait[worst]])
    source, destination = (timeline.tracks[idx].rank for idx in (timeline.spans.track[signal[worst]], track))
    text = (
        f"channel {channel.name}: {how_many(len(wrong), 'wait')} over before the signal began; worst by "
        f"{duration(int(early[worst]))}, from rank {source} to {destination}, clocks allow {duration(slack[worst])}"
    )
    if channel.kind.has_levels:
        text += "; do `value` and `wanted` count from the same 0?"
    return [Problem("error", "backwards_flow", destination, track, text, len(wrong))]
