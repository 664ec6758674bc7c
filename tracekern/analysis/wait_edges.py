"""What released each wait: the signal that arrived last or, at a block or grid barrier, the warp that came last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekern.analysis.groups import group_rows
from tracekern.timeline.flows import join_flows
from tracekern.timeline.headless import maybe_headless
from tracekern.timeline.model import OPEN_END, ChannelKind, EventClass, EventType, Flows, Int64, Timeline
from tracekern.timeline.select import take_spans

Mask = npt.NDArray[np.bool_]

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
    meets_others = {
        event.channel for event in timeline.events if any(field.name == "peer" for field in event.begin_fields)
    }
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
    a flight recorder overwrote the first ones, the k-th from the end. Where a warp left before another one came,
    records are missing and nobody is said to have been last; nor where it may be the begin of a wait that is missing.
    """
    spans = timeline.spans
    block_of_track = np.array([track.block for track in timeline.tracks], np.int64)
    headless = maybe_headless(timeline)
    parts = [
        _meetings(
            timeline,
            np.flatnonzero(spans.event == idx),
            block_of_track if event.name == BLOCK_BARRIER else np.zeros_like(block_of_track),
            headless,
        )
        for idx, event in enumerate(timeline.events)
        if is_local_barrier(event)
    ]
    if not parts:
        return LocalBarriers(np.empty(0, np.int64), np.empty(0, np.int64))
    return LocalBarriers(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _meetings(timeline: Timeline, rows: Int64, place_of_track: Int64, headless: Mask) -> tuple[Int64, Int64]:
    """(waits, last arrivals) among the spans `rows` of one event, sorted by (track, start)."""
    spans = timeline.spans
    rows = rows[spans.launch[rows] >= 0]
    lacks_first = np.array([launch.records_overwritten > 0 for launch in timeline.launches], bool)[spans.launch]
    rows = rows[~lacks_first[rows] | (spans.end[rows] != OPEN_END)]
    passes = group_rows(len(rows), spans.launch[rows], spans.track[rows]).group
    order = np.argsort(passes, kind="stable")
    rows, passes = rows[order], passes[order]
    counted_from = np.where(lacks_first[rows], *(np.searchsorted(passes, passes, side) for side in ("right", "left")))
    ordinal = np.arange(len(rows)) - counted_from
    meeting = group_rows(len(rows), spans.launch[rows], place_of_track[spans.track[rows]], ordinal)
    start, end = spans.start[rows], spans.end[rows]
    closed = end != OPEN_END
    came_last = np.flatnonzero(start == meeting.largest(start)[meeting.group])
    last = np.empty(len(meeting), np.int64)
    last[meeting.group[came_last]] = came_last
    left_early = closed & (end < start[last[meeting.group]])
    sound = np.ones(len(meeting), bool)
    sound[meeting.group[left_early | headless[rows]]] = False
    kept = closed & sound[meeting.group]
    return rows[kept], rows[last[meeting.group[kept]]]
