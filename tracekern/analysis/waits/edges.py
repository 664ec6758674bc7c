"""What released each wait: the signal that arrived last or, at a block or grid barrier, the warp that came last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.timeline.join.flows import join_flows, lossy_launches, values_of
from tracekern.timeline.join.members import ranks_beyond
from tracekern.timeline.model import (
    OPEN_END,
    Channel,
    ChannelKind,
    EventClass,
    EventType,
    Flows,
    Int64,
    Mask,
    Timeline,
    TrackKind,
)
from tracekern.timeline.select import take_spans

NEVER = np.int64(1 << 61)
"""The time at which a signal that never closed has arrived. Small enough to be added to."""

_BY_NAME = {
    "wait_block": Channel("wait_block", ChannelKind.GROUP, ()),
    "wait_grid": Channel("wait_grid", ChannelKind.GRID, ()),
}
"""Channels of waits whose names say who meets there: all warps of the block, or of the launch."""
_NUM_WARPS = "warps"
"""Field that says how many warps meet."""


def of_events(timeline: Timeline, chosen: list[bool]) -> Mask:
    """[num_spans] whether the span's event is chosen, by a list over timeline.events."""
    return np.asarray(np.array([*chosen, False], bool)[timeline.spans.event], bool)


def signal_ends(timeline: Timeline, signal: Int64) -> Int64:
    """[n] when each signal span ended; NEVER for one that did not."""
    end = timeline.spans.end[signal]
    return np.where(end == OPEN_END, NEVER, end)


def is_barrier(timeline: Timeline) -> list[bool]:
    """Returns for each event whether it belongs to a channel of kind `barrier`."""
    return [event.channel is not None and event.channel.kind is ChannelKind.BARRIER for event in timeline.events]


def last_signals(timeline: Timeline) -> Flows:
    """Finds the signal that arrived last for each wait that has a flow; sorted by wait."""
    signal, wait = timeline.flows.signal, timeline.flows.wait
    if np.any(np.diff(wait) <= 0):  # several signals to one wait, or edges in no order
        order = np.lexsort((signal, timeline.spans.start[signal], signal_ends(timeline, signal), wait))
        signal, wait = signal[order], wait[order]
        last = np.append(np.diff(wait) != 0, True)
        signal, wait = signal[last], wait[last]
    return Flows(signal, wait)


def barrier_arrivals(timeline: Timeline) -> Flows:
    """All signals of each closed wait on a `barrier` channel, sorted by wait and then by arrival (their start).

    None of a wait where a rank's signal may be missing: it may have come last.
    """
    chosen = is_barrier(timeline)
    if not any(chosen):
        return Flows()
    kept = of_events(timeline, chosen)
    old_index = np.flatnonzero(kept)
    flows, _ = join_flows(take_spans(timeline, kept), every_barrier_signal=True)
    signal, wait = old_index[flows.signal], old_index[flows.wait]
    known = _all_told(timeline, signal, wait)
    signal, wait = signal[known], wait[known]
    order = np.lexsort((signal, timeline.spans.start[signal], wait))
    return Flows(signal[order], wait[order])


def _all_told(timeline: Timeline, signal: Int64, wait: Int64) -> Mask:
    """[n] False for arrivals at a barrier that a rank is not among whose records were lost, or that is not here."""
    spans, rank_of_track = timeline.spans, timeline.track_ranks()
    lossy = {launch.rank for launch in timeline.launches if launch.records_lost or launch.records_overwritten}
    is_lossy = np.array([rank in lossy for rank in range(int(rank_of_track.max(initial=-1)) + 1)], bool)
    beyond = ranks_beyond(timeline, {rank.rank for rank in timeline.ranks})
    is_rank_missing = np.array([bool(ranks) for ranks in beyond], bool)[spans.launch[wait]]
    meets_others = {event.channel for event in timeline.events if event.has("peer")}
    across = of_events(timeline, [event.channel in meets_others for event in timeline.events])[wait]

    pairs = group_rows(len(wait), wait, rank_of_track[spans.track[signal]])
    at, source = pairs.columns
    of_others = is_lossy[source] & (source != rank_of_track[spans.track[at]])
    num_told = np.bincount(at[of_others], minlength=len(spans))[wait]
    own_lossy = is_lossy[rank_of_track[spans.track[wait]]]
    told = np.where(across, (num_told == len(lossy) - own_lossy) & ~is_rank_missing, ~own_lossy)
    return np.asarray(told, bool)


@dataclass(frozen=True)
class LocalBarriers:
    """[n] closed waits at block and grid barriers of which it is on record who came last."""

    wait: Int64
    """Index into Timeline.spans."""
    last: Int64
    """The wait span, at the same barrier, of the warp that came last."""


def local_channel(event: EventType) -> Channel | None:
    """Returns the channel of a wait in which warps of a block or grid wait for each other; None of other events."""
    if event.event_class is not EventClass.WAIT:
        return None
    channel = event.channel or _BY_NAME.get(event.name)
    return channel if channel and channel.kind.is_local else None


def local_barriers(timeline: Timeline) -> LocalBarriers:
    """Who came last at barriers of warps.

    Every warp passes them equally often, so the k-th wait of each warp belongs to the k-th barrier of its launch; where
    a flight recorder overwrote the first ones, the k-th from the end. No warp counts as last where a warp
    left before another one came (records are missing), where the wait of a warp was overwritten, and where the warp
    that seems to have come last came earlier by an unknown time: the begin of its wait was overwritten.
    """
    channels = [local_channel(event) for event in timeline.events]
    parts = [(np.empty(0, np.int64),) * 2]
    for channel in sorted(set(channels) - {None}, key=str):
        assert channel is not None
        rows = np.flatnonzero(of_events(timeline, [of_event == channel for of_event in channels]))
        parts.append(_meetings(timeline, channel, rows[timeline.spans.launch[rows] >= 0]))
    return LocalBarriers(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _meetings(timeline: Timeline, channel: Channel, rows: Int64) -> tuple[Int64, Int64]:
    """(waits, last arrivals) among the waits `rows` at barriers of one channel, sorted by (track, start)."""
    spans = timeline.spans
    if not len(rows):
        return rows, rows
    lacks_first = np.array([launch.records_overwritten > 0 for launch in timeline.launches], bool)[spans.launch]
    rows = rows[~lacks_first[rows] | (spans.end[rows] != OPEN_END)]
    keys = [values_of(timeline, rows, name) for name in channel.key]
    passes = group_rows(len(rows), spans.launch[rows], spans.track[rows], *keys).group
    order = np.argsort(passes, kind="stable")
    rows, passes, keys = rows[order], passes[order], [key[order] for key in keys]
    counted_from = np.where(lacks_first[rows], *(np.searchsorted(passes, passes, side) for side in ("right", "left")))
    ordinal = np.arange(len(rows)) - counted_from
    place_of_track = np.array([track.block for track in timeline.tracks], np.int64)
    if channel.kind is ChannelKind.GRID:
        place_of_track[:] = 0
    meeting = group_rows(len(rows), spans.launch[rows], place_of_track[spans.track[rows]], ordinal, *keys)
    start, end = spans.start[rows], spans.end[rows]
    closed, headless = end != OPEN_END, timeline.headless_spans()[rows]
    arrival = 2 * start + ~headless  # of two at one time the one that is known to have come then
    came_last = np.flatnonzero(arrival == meeting.largest(arrival)[meeting.group])
    last = np.empty(len(meeting), np.int64)
    last[meeting.group[came_last]] = came_last
    left_early = closed & (end < start[last[meeting.group]])
    launch, place, *_ = meeting.columns
    wanted = np.maximum(
        values_of(timeline, rows[last], _NUM_WARPS), _num_warps(timeline, launch, place, place_of_track) * (not keys)
    )
    sound = ~headless[last] & (meeting.count() >= wanted)
    if keys:  # who belongs there is not on record where records are missing
        sound &= (wanted > 0) | ~lossy_launches(timeline)[launch]
    sound[meeting.group[left_early]] = False
    kept = closed & sound[meeting.group]
    return rows[kept], rows[last[meeting.group[kept]]]


def _num_warps(timeline: Timeline, launch: Int64, place: Int64, place_of_track: Int64) -> Int64:
    """[n] how many warps recorded something in that place of that launch; 0 for a launch that lost no record."""
    is_lossy = lossy_launches(timeline)
    if not is_lossy.any():
        return np.zeros(len(launch), np.int64)
    is_device = timeline.tracks_of(TrackKind.DEVICE)
    num_tracks, num_places = len(timeline.tracks), int(place_of_track.max()) + 1
    runs = []
    for rows in (timeline.spans, timeline.marks):
        chosen = np.flatnonzero((rows.launch >= 0) & is_lossy[rows.launch] & is_device[rows.track])
        run = rows.launch[chosen].astype(np.int64) * num_tracks + rows.track[chosen]
        runs.append(run[np.flatnonzero(np.diff(run, prepend=-1))])
    of_launch, track = np.divmod(np.unique(np.concatenate(runs)), num_tracks)
    known = np.sort(of_launch * num_places + place_of_track[track])
    after, before = (np.searchsorted(known, launch * num_places + place, side) for side in ("right", "left"))
    return after - before
