"""A Timeline made ready to be drawn: spans in order, open ones with an end, only arrows that can be drawn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput
from tracekern.timeline.facts.iterations import find_iterations, launch_iterations
from tracekern.timeline.facts.open_spans import known_ends
from tracekern.timeline.model import (
    OPEN_END,
    EventClass,
    EventType,
    Flows,
    Int64,
    Launch,
    Mask,
    Problem,
    Spans,
    Timeline,
    TrackKind,
)
from tracekern.timeline.select import take_tracks

Permutation = npt.NDArray[np.intp]
RESERVED_ARGUMENTS = frozenset({"launch", "launch_key", "communicator", "start_up", "epoch", "open", "released_by"})
"""Arguments that every span of a kernel has beside its fields. The span of a launch has fields that say the same."""

MANY_ITERATIONS = 3
"""With so many iterations or more, the one of median length is the typical one."""
OUTLIER = 2


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

    def problem_times(self) -> list[tuple[Problem, int]]:
        """Each problem with the time to draw it at: the end of its track, where a loss began, or the start of all.

        There a nanosecond apart: instants of one time are drawn below each other, and would make their row a tower.
        """
        last_end = np.full(len(self.timeline.tracks), self.first_ns, np.int64)
        np.maximum.at(last_end, self.timeline.spans.track, self.draw_end)
        at_start = itertools.count(self.first_ns)
        return [
            (problem, int(last_end[problem.track]) if problem.track >= 0 else next(at_start))
            for problem in self.timeline.problems
        ]


@dataclass(frozen=True)
class FirstWaits:
    """The waits that a reader should see first: indices of spans, -1 for none."""

    longest: int
    """The longest wait of the typical iteration; of all iterations if there are fewer than MANY_ITERATIONS."""
    outlier: int
    """The longest of all, where it is of another iteration and OUTLIER times as long."""
    when: str = ""
    """Which iteration the longest is of, in words; "" where there are few."""
    outlier_when: str = ""


def first_waits(drawing: Drawing) -> FirstWaits:
    """A wait that never ended comes first, in whatever iteration."""
    choices, spans = _choices(drawing), drawing.timeline.spans
    longest = _longest(drawing, choices)
    iterations = find_iterations(drawing.timeline)
    if longest < 0 or spans.end[longest] == OPEN_END or len(iterations) < MANY_ITERATIONS:
        return FirstWaits(longest, -1)
    of_launch = np.append(iterations.of_launch, -1)[spans.launch]
    number = int(iterations.number[iterations.best_median_worst()[1]])
    is_typical = of_launch == number
    typical = _longest(drawing, [choice & is_typical for choice in choices])
    if typical < 0:
        return FirstWaits(longest, -1)
    wait_ns = drawing.draw_end - spans.start
    is_outlier = not is_typical[longest] and wait_ns[longest] > OUTLIER * wait_ns[typical]
    return FirstWaits(
        longest=typical,
        outlier=longest if is_outlier else -1,
        when=f"in iteration {number}, of median length among {len(iterations)}",
        outlier_when=f"in iteration {of_launch[longest]}" if of_launch[longest] >= 0 else "outside the iterations",
    )


def _longest(drawing: Drawing, choices: Sequence[Mask]) -> int:
    """The longest span of the first choice that has any; -1 without."""
    which = np.flatnonzero(next((choice for choice in choices if choice.any()), choices[-1]))
    return int(which[(drawing.draw_end - drawing.timeline.spans.start)[which].argmax()]) if len(which) else -1


def _choices(drawing: Drawing) -> list[Mask]:
    """Waits of kernels and engines, [num_spans] masks, the preferred ones first.

    Preferred is one that never ended, on a rank that lived to close its capture: what a kernel hung in. Then one that a
    signal released, first of all that of another rank: it has an arrow to follow. One of start-up comes last.
    """
    timeline = drawing.timeline
    is_wait = timeline.events_of(EventClass.WAIT)
    is_theirs = timeline.tracks_of(TrackKind.DEVICE) | timeline.tracks_of(TrackKind.ENGINE)
    spans = timeline.spans
    chosen = is_wait[spans.event] & is_theirs[spans.track]
    alive = {rank.rank for rank in timeline.ranks if rank.state != "salvaged"}
    is_alive = np.array([track.rank in alive for track in timeline.tracks] or [False])
    hung = chosen & (spans.end == OPEN_END)
    rank = timeline.track_ranks()[spans.track]
    is_released = chosen & (drawing.releaser >= 0)
    from_afar = is_released & (rank[drawing.releaser] != rank)
    later = ~drawing.in_start_up
    return [hung & is_alive[spans.track], hung, from_afar & later, is_released & later, chosen & later, chosen]


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


def limit_flows(drawing: Drawing, max_flows: int) -> Drawing:
    """The drawing with at most `max_flows` arrows, those of the longest waits."""
    if int(drawing.flow_drawable.sum()) <= max_flows:
        return drawing
    return replace(drawing, flow_drawn=drawing.flow_drawable & _of_longest_waits(drawing, max_flows))


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


def keep_one_row_per_block(timeline: Timeline) -> tuple[Timeline, int]:
    """The timeline with one track per block and role, that of its first warp with spans; and how many it lacks."""
    has_spans = np.bincount(timeline.spans.track, minlength=len(timeline.tracks)) > 0
    first_warps: dict[tuple[int, int, int, str], int] = {}
    for track_idx, track in enumerate(timeline.tracks):
        if track.kind == TrackKind.DEVICE and has_spans[track_idx]:  # the warps of a block are in order
            first_warps.setdefault((track.rank, track.stream, track.block, track.role), track_idx)
    kept = ~timeline.tracks_of(TrackKind.DEVICE)
    kept[list(first_warps.values())] = True
    reduced = take_tracks(timeline, kept)
    return reduced, len(timeline.spans) - len(reduced.spans)


def _of_longest_waits(drawing: Drawing, max_flows: int) -> Mask:
    """[num_flows] False for flows of the shorter waits, beyond `max_flows`.

    Those that a reader sees first come first. Waits for other ranks come before those within a rank, however long.
    """
    timeline, drawable = drawing.timeline, drawing.flow_drawable
    signal, wait = timeline.flows.signal, timeline.flows.wait
    wait_ns = np.where(drawable, drawing.draw_end[wait] - timeline.spans.start[wait], -1)
    rank_of_track, track = timeline.track_ranks(), timeline.spans.track
    is_local = rank_of_track[track[signal]] == rank_of_track[track[wait]]
    first = first_waits(drawing)
    is_first = np.isin(wait, (first.longest, first.outlier))
    kept = np.ones(len(drawable), bool)
    kept[np.lexsort((-wait_ns, is_local | ~drawable, ~is_first))[max_flows:]] = False
    return kept


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
