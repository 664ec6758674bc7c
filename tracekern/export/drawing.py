"""A Timeline made ready to be drawn: spans in order, open ones with an end, only arrows that can be drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput
from tracekern.timeline.facts.iterations import launch_iterations
from tracekern.timeline.facts.open_spans import known_ends
from tracekern.timeline.model import (
    OPEN_END,
    EventClass,
    EventType,
    Flows,
    Int64,
    Launch,
    Mask,
    Spans,
    Timeline,
    TrackKind,
)
from tracekern.timeline.select import take_tracks

Permutation = npt.NDArray[np.intp]
RESERVED_ARGUMENTS = frozenset({"launch", "launch_key", "communicator", "start_up", "epoch", "open", "released_by"})
"""Arguments that every span of a kernel has beside its fields. The span of a launch has fields that say the same."""


@dataclass(frozen=True)
class Drawing:
    timeline: Timeline
    """Spans in order of (track, start, longest first)."""
    draw_end: Int64
    """[num_spans] `end`; for an open span the last time on its clock, or the start of the next launch of its track."""
    first_ns: int
    last_ns: int
    flow_drawable: Mask
    """[num_flows] False for arrows that would point backwards: the wait ended before its signal began."""
    flow_drawn: Mask
    """[num_flows] flow_drawable, or those that limit_flows() left."""
    flow_early: Mask
    """[num_flows] True where the waiter saw the signal before the signal's span closed."""
    releaser: Int64
    """[num_spans] For a wait the index of the signal that arrived last; -1 where there is none on record, or drawn."""
    part: str = ""
    """What of the timeline is drawn, in words; "" where all is."""
    released_by: tuple[list[str], Int64] | None = None
    """In a part: texts of the signals that ended waits, drawn or not, and [num_spans] index into them, -1 for none."""

    @cached_property
    def is_start_up(self) -> Mask:
        """[num_launches] Those before the first iteration of their rank, and those that align ranks."""
        return launch_iterations(self.timeline).is_start_up

    @property
    def in_start_up(self) -> Mask:
        """[num_spans]"""
        return np.append(self.is_start_up, False)[self.timeline.spans.launch]


def prepare(timeline: Timeline, last_heard: Int64 | None = None) -> Drawing:
    """The drawing of all of `timeline`. last_heard: as of known_ends().

    Raises BadInput for a timeline in ticks: ranks on different clocks have no common picture.
    """
    if timeline.unit != "ns":
        raise BadInput(
            f"the timeline is in {timeline.unit}, each rank on its own clock; align it to ns before exporting"
        )
    _check_host_names(timeline)
    draw_end = np.maximum(known_ends(timeline, last_heard), timeline.spans.start)
    order = _drawing_order(timeline.spans, draw_end)
    if order is not None:
        new_index = np.empty(len(order), np.int64)
        new_index[order] = np.arange(len(order))
        flows = Flows(new_index[timeline.flows.signal], new_index[timeline.flows.wait])
        timeline = timeline.replace(spans=timeline.spans.take(order), flows=flows)
        draw_end = draw_end[order]
    signal, wait = timeline.flows.signal, timeline.flows.wait
    drawable = draw_end[wait] > timeline.spans.start[signal]
    early = draw_end[signal] >= draw_end[wait]
    first_ns, last_ns = _extent(timeline)
    return Drawing(
        timeline=timeline,
        draw_end=draw_end,
        first_ns=first_ns,
        last_ns=max(last_ns, int(draw_end.max(initial=last_ns))),
        flow_drawable=drawable,
        flow_drawn=drawable,
        flow_early=early,
        releaser=_releasers(timeline, draw_end, drawable, early),
    )


def argument_names(event: EventType, reserved: frozenset[str] = RESERVED_ARGUMENTS) -> tuple[list[str], list[str]]:
    """Names under which the begin and end fields of an event are shown: each once, and none of the reserved ones.

    Of two fields with one name the end's keeps it: it tells what came, the other what was expected.
    """
    taken = {"open"} if event.event_class is EventClass.LAUNCH else set(reserved)
    names: tuple[list[str], list[str]] = ([], [])
    for prefix, fields, result in (("end_", event.end_fields, names[1]), ("begin_", event.begin_fields, names[0])):
        for field in fields:
            name = field.name
            while name in taken:
                name = prefix + name
            taken.add(name)
            result.append(name)
    return names


def launch_shape(launch: Launch) -> dict[str, int]:
    """Arguments of a launch's own span: its blocks, the warps of a block, and their groups where there are any."""
    shape = {"blocks": launch.blocks_run or launch.num_blocks, "warps": launch.warps_per_block, "groups": launch.groups}
    return {name: value for name, value in shape.items() if value}


def first_warps(timeline: Timeline, num_spans: Int64) -> Mask:
    """[num_tracks] which tracks stay where there is one per block and role: that of its first warp with spans, and all
    that are of no kernel. num_spans: [num_tracks] of the whole run."""
    first: dict[tuple[int, int, int, str], int] = {}
    for track_idx, track in enumerate(timeline.tracks):
        if track.kind == TrackKind.DEVICE and num_spans[track_idx]:  # the warps of a block are in order
            first.setdefault((track.rank, track.stream, track.block, track.role), track_idx)
    kept = ~timeline.tracks_of(TrackKind.DEVICE)
    kept[list(first.values())] = True
    return kept


def in_one_row_per_block(tables: Timeline, num_spans: Int64) -> Callable[[Timeline], Timeline]:
    """What leaves first_warps() alone of any part of a run. Parts share the tables that are left."""
    kept = first_warps(tables, num_spans)
    left = take_tracks(tables, kept)
    return lambda part: take_tracks(part, kept).replace(tracks=left.tracks, problems=left.problems)


def keep_one_row_per_block(timeline: Timeline) -> tuple[Timeline, int]:
    """The timeline with first_warps() alone; and how many spans it lacks."""
    num_spans = np.bincount(timeline.spans.track, minlength=len(timeline.tracks))
    reduced = take_tracks(timeline, first_warps(timeline, num_spans))
    return reduced, len(timeline.spans) - len(reduced.spans)


def _releasers(timeline: Timeline, draw_end: Int64, drawable: Mask, early: Mask) -> Int64:
    ended = drawable & (timeline.spans.end[timeline.flows.wait] != OPEN_END)
    signal, wait = timeline.flows.signal[ended], timeline.flows.wait[ended]
    arrival = np.where(early[ended], draw_end[wait], draw_end[signal])
    order = np.lexsort((signal, arrival))
    releaser = np.full(len(timeline.spans), -1, np.int64)
    releaser[wait[order]] = signal[order]  # of several the last assignment stays
    return releaser


def _check_host_names(timeline: Timeline) -> None:
    is_host = timeline.events_of(EventClass.HOST)[timeline.spans.event]
    highest = int(timeline.spans.begin_payload[is_host].max(initial=0))
    if is_host.any() and highest >= len(timeline.host_names):
        raise BadInput(f"a host span has name {highest}, the timeline has {len(timeline.host_names)} host names")


def _extent(timeline: Timeline) -> tuple[int, int]:
    """First and last time of anything in the timeline; (0, 0) when it is empty."""
    times = [column for column in (timeline.spans.start, timeline.marks.time) if len(column)]
    if not times:
        return 0, 0
    first = min(int(column.min()) for column in times)
    last = max(int(column.max()) for column in [*times, *([timeline.spans.end] if len(timeline.spans) else [])])
    return first, last


def _drawing_order(spans: Spans, draw_end: Int64) -> Permutation | None:
    """The order of (track, start, longest first), or None when the spans are in it already."""
    track_step = np.diff(spans.track)
    start_step = np.diff(spans.start)
    end_step = np.diff(draw_end)
    in_order = (track_step > 0) | ((track_step == 0) & ((start_step > 0) | ((start_step == 0) & (end_step <= 0))))
    if in_order.all():
        return None
    return np.lexsort((-draw_end, spans.start, spans.track))
