"""What released each wait: the signal that arrived last or, at a block or grid barrier, the warp that came last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.timeline.flows import join_flows
from tracekern.timeline.model import (
    OPEN_END,
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

BLOCK_BARRIER, GRID_BARRIER = "wait_block", "wait_grid"
"""Waits without a channel whose names say who meets there: all warps of the block, or of the launch."""


def of_events(timeline: Timeline, chosen: list[bool]) -> Mask:
    """[num_spans] whether the span's event is chosen, by a list over timeline.events."""
    return np.asarray(np.array([*chosen, False], bool)[timeline.spans.event], bool)


def signal_ends(timeline: Timeline, signal: Int64) -> Int64:
    """[n] when each signal span ended; NEVER for one that did not."""
    end = timeline.spans.end[signal]
    return np.where(end == OPEN_END, NEVER, end)


def is_barrier(timeline: Timeline) -> list[bool]:
    """By event: does it belong to a channel of kind `barrier`?"""
    return [event.channel is not None and event.channel.kind is ChannelKind.BARRIER for event in timeline.events]


def last_signals(timeline: Timeline) -> Int64:
    """[num_spans] the signal span that arrived last at each wait that has a flow; else -1."""
    signal, wait = timeline.flows.signal, timeline.flows.wait
    if np.any(np.diff(wait) <= 0):  # several signals to one wait, or edges in no order
        order = np.lexsort((signal, timeline.spans.start[signal], signal_ends(timeline, signal), wait))
        signal, wait = signal[order], wait[order]
        last = np.append(np.diff(wait) != 0, True)
        signal, wait = signal[last], wait[last]
    result = np.full(len(timeline.spans), -1, np.int64)
    result[wait] = signal
    return result


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
    num_ranks = len(timeline.ranks)
    is_rank_missing = any(rank.metadata.get("num_ranks", num_ranks) > num_ranks for rank in timeline.ranks)
    meets_others = {event.channel for event in timeline.events if event.has("peer")}
    across = of_events(timeline, [event.channel in meets_others for event in timeline.events])[wait]

    pairs = group_rows(len(wait), wait, rank_of_track[spans.track[signal]])
    at, source = pairs.columns
    of_others = is_lossy[source] & (source != rank_of_track[spans.track[at]])
    num_told = np.bincount(at[of_others], minlength=len(spans))[wait]
    own_lossy = is_lossy[rank_of_track[spans.track[wait]]]
    told = np.where(across, (num_told == len(lossy) - own_lossy) & (not is_rank_missing), ~own_lossy)
    return np.asarray(told, bool)


@dataclass(frozen=True)
class LocalBarriers:
    """[n] closed waits at block and grid barriers of which it is on record who came last."""

    wait: Int64
    """Index into Timeline.spans."""
    last: Int64
    """The wait span, at the same barrier, of the warp that came last."""


def is_local_barrier(event: EventType) -> bool:
    """Does this wait end when all warps of the block or grid are there?"""
    is_wait = event.event_class is EventClass.WAIT and event.channel is None
    return is_wait and event.name in (BLOCK_BARRIER, GRID_BARRIER)


def local_barriers(timeline: Timeline) -> LocalBarriers:
    """Who came last at block and grid barriers.

    Every warp passes them equally often, so the k-th wait of each warp belongs to the k-th barrier of its launch; where
    a flight recorder overwrote the first ones, the k-th from the end. No warp counts as last where a warp
    left before another one came (records are missing), where the wait of a warp was overwritten, and where the warp
    that seems to have come last came earlier by an unknown time: the begin of its wait was overwritten.
    """
    block_of_track = np.array([track.block for track in timeline.tracks], np.int64)
    parts = []
    for name, place_of_track in ((BLOCK_BARRIER, block_of_track), (GRID_BARRIER, np.zeros_like(block_of_track))):
        chosen = [is_local_barrier(event) and event.name == name for event in timeline.events]
        parts.append(_meetings(timeline, np.flatnonzero(of_events(timeline, chosen)), place_of_track))
    return LocalBarriers(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _meetings(timeline: Timeline, rows: Int64, place_of_track: Int64) -> tuple[Int64, Int64]:
    """(waits, last arrivals) among the waits `rows` at barriers of one kind, sorted by (track, start)."""
    spans = timeline.spans
    rows = rows[spans.launch[rows] >= 0]
    if not len(rows):
        return rows, rows
    lacks_first = np.array([launch.records_overwritten > 0 for launch in timeline.launches], bool)[spans.launch]
    rows = rows[~lacks_first[rows] | (spans.end[rows] != OPEN_END)]
    passes = group_rows(len(rows), spans.launch[rows], spans.track[rows]).group
    order = np.argsort(passes, kind="stable")
    rows, passes = rows[order], passes[order]
    counted_from = np.where(lacks_first[rows], *(np.searchsorted(passes, passes, side) for side in ("right", "left")))
    ordinal = np.arange(len(rows)) - counted_from
    meeting = group_rows(len(rows), spans.launch[rows], place_of_track[spans.track[rows]], ordinal)
    start, end = spans.start[rows], spans.end[rows]
    closed, headless = end != OPEN_END, timeline.headless_spans()[rows]
    arrival = 2 * start + ~headless  # of two at one time the one that is known to have come then
    came_last = np.flatnonzero(arrival == meeting.largest(arrival)[meeting.group])
    last = np.empty(len(meeting), np.int64)
    last[meeting.group[came_last]] = came_last
    left_early = closed & (end < start[last[meeting.group]])
    launch, place, _ = meeting.columns
    sound = ~headless[last] & (meeting.count() >= _num_warps(timeline, launch, place, place_of_track))
    sound[meeting.group[left_early]] = False
    kept = closed & sound[meeting.group]
    return rows[kept], rows[last[meeting.group[kept]]]


def _num_warps(timeline: Timeline, launch: Int64, place: Int64, place_of_track: Int64) -> Int64:
    """[n] how many warps recorded something in that place of that launch; 0 for a launch that lost no record."""
    is_lossy = np.array([entry.records_lost + entry.records_overwritten > 0 for entry in timeline.launches], bool)
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
