"""What a Timeline holds, rank by rank: counts, losses, clock bounds, and how much of the time was waiting."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.partial import Partial, add
from tracekern.formatting import brief
from tracekern.timeline.columns import parts_by_track
from tracekern.timeline.facts.open_spans import end_waits
from tracekern.timeline.intervals import exposed
from tracekern.timeline.model import (
    UNCOUNTED_LOSS_KINDS,
    EventClass,
    Int64,
    Launch,
    Rank,
    Spans,
    Timeline,
    Track,
    TrackKind,
    clocks_of_ranks,
    count_problems,
    field_values,
)


@dataclass(frozen=True)
class EventCount:
    """Spans of one event on the device tracks of one rank; one that never closed lasts 0 ns, but for waits."""

    count: int
    total_ns: int
    longest_ns: int
    place: tuple[int, int]
    """Track and start of the longest; of several that are as long, the first."""
    peer: int
    """The rank that it was about; -1 where the event names no peer."""

    def __add__(self, other: EventCount) -> EventCount:
        longest = min(self, other, key=lambda one: (-one.longest_ns, one.place))
        return dataclasses.replace(longest, count=self.count + other.count, total_ns=self.total_ns + other.total_ns)


@dataclass(frozen=True)
class Extent:
    """Time from the first event to the last."""

    first: int
    last: int

    def __add__(self, other: Extent) -> Extent:
        return Extent(min(self.first, other.first), max(self.last, other.last))


@dataclass(frozen=True)
class SpanCounts(Partial):
    """Arrays are [num_tracks]; times are those of device tracks alone, 0 for others."""

    num_flows: int
    spans: Int64
    open_spans: Int64
    marks: Int64
    busy_ns: Int64
    """Time in closed spans and endless waits. Time in several at once counts once."""
    wait_ns: Int64
    """Time in waits, likewise."""
    events: dict[tuple[int, int], EventCount]
    """(rank, number of the event) -> its spans."""
    extent: dict[int, Extent]
    """Where clocks are on one axis that of the whole run, under -1; else that of each rank, without its host."""

    @classmethod
    def of(cls, timeline: Timeline) -> SpanCounts:
        spans, num_tracks = timeline.spans, len(timeline.tracks)
        is_device, is_wait = timeline.tracks_of(TrackKind.DEVICE), timeline.events_of(EventClass.WAIT)
        busy_ns, wait_ns = np.zeros((2, num_tracks), np.int64)
        events: dict[tuple[int, int], EventCount] = {}
        for _, part in parts_by_track(end_waits(timeline).spans):
            first = np.flatnonzero(np.append(True, part.track[1:] != part.track[:-1]))
            closed = ~part.is_open & is_device[part.track]
            busy_ns[part.track[first]] = np.add.reduceat(exposed(part, closed), first)
            wait_ns[part.track[first]] = np.add.reduceat(exposed(part, closed & is_wait[part.event]), first)
            events = add(events, _count_events(timeline, part.take(np.flatnonzero(is_device[part.track]))))
        return cls(
            num_flows=len(timeline.flows),
            spans=np.bincount(spans.track, minlength=num_tracks),
            open_spans=np.bincount(spans.track[spans.is_open], minlength=num_tracks),
            marks=np.bincount(timeline.marks.track, minlength=num_tracks),
            busy_ns=busy_ns,
            wait_ns=wait_ns,
            events=events,
            extent=_extent(timeline),
        )


def _count_events(timeline: Timeline, spans: Spans) -> dict[tuple[int, int], EventCount]:
    """Counts the spans of each rank and event."""
    groups = group_rows(len(spans), timeline.track_ranks()[spans.track], spans.event)
    duration = np.where(spans.is_open, 0, spans.end - spans.start)
    longest_ns = groups.largest(duration)
    candidates = np.flatnonzero(duration == longest_ns[groups.group])[::-1]
    longest = np.empty(len(groups), np.int64)
    longest[groups.group[candidates]] = candidates  # from the back: the first stays
    columns = (*groups.columns, groups.count(), groups.sum(duration), longest_ns, longest)
    found = {}
    for rank, event, count, total_ns, of_longest_ns, row in zip(*(column.tolist() for column in columns), strict=True):
        peer = field_values(timeline.events[event], "peer", spans, [row])
        place = int(spans.track[row]), int(spans.start[row])
        own = EventCount(count, total_ns, of_longest_ns, place, -1 if peer is None else int(peer[0]))
        found[rank, event] = own
    return found


def _extent(timeline: Timeline) -> dict[int, Extent]:
    spans, marks = timeline.spans, timeline.marks
    starts, ends = np.append(spans.start, marks.time), np.append(np.maximum(spans.start, spans.end), marks.time)
    if timeline.aligned:
        return {-1: Extent(int(starts.min()), int(ends.max()))} if len(starts) else {}
    track = np.append(spans.track, marks.track)
    of_rank = np.where(timeline.tracks_of(TrackKind.HOST)[track], -1, timeline.track_ranks()[track])
    rows = {rank.rank: np.flatnonzero(of_rank == rank.rank) for rank in timeline.ranks}
    return {rank: Extent(int(starts[own].min()), int(ends[own].max())) for rank, own in rows.items() if len(own)}


@dataclass(frozen=True)
class EventSummary:
    """The spans of one event on the device tracks of one rank. Spans that never closed count, but only waits have a
    duration then."""

    event: str
    event_class: str
    count: int
    total_ns: int
    longest_ns: int
    longest_peer: int
    """The rank that the longest span was about; -1 where the event names no peer."""


@dataclass(frozen=True)
class RankSummary:
    rank: int
    node: str
    host: str
    """Host name, by which a node is called."""
    machine: str
    """Boot id of the running kernel; "" in older dumps."""
    nics: tuple[str, ...]
    """Provider and address, or name, of the network interfaces that its transfer engines used."""
    device: str
    backend: str
    state: str  # "closed" | "salvaged": its process died and the launcher kept what it had written | "running"
    num_launches: int
    num_device_tracks: int
    num_host_tracks: int
    num_spans: int
    num_marks: int
    num_open_spans: int
    records_lost: int
    has_lost_more: bool
    """Whether records are missing that nobody could count."""
    records_per_track: int
    records_needed: int
    """records_per_track that would have lost nothing; 0 when nothing was lost."""
    wait_share: float
    """Part of the time inside recorded spans of the device that was inside a wait, 0..1; nan without spans."""
    clock_method: str
    clock_hard_ns: float
    clock_round_trip_ns: float | None
    """What round trips alone prove, where flows tightened it to clock_hard_ns; None where they did not."""
    clock_sigma_ns: float
    """At most clock_hard_ns: samples that repeat badly take nothing from what is proven."""
    clock_doubt_ns: float
    """Part of clock_hard_ns: what rounds of samples or flows contradict. Not covered by clock_sigma_ns."""
    clock_is_checked: bool
    """Whether a later round or flows would show that the clock jumped."""
    clock_of_rank: int
    """The lowest rank that reads the same clock; this rank itself if no other is known to."""
    events: tuple[EventSummary, ...]

    __repr__ = brief


@dataclass(frozen=True)
class Summary:
    title: str
    aligned: bool
    num_spans: int
    num_flows: int
    duration_ns: int
    ranks: tuple[RankSummary, ...]
    problems: dict[str, int]
    """How often each kind of problem was met."""

    __repr__ = brief

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values; nan becomes None, which JSON knows."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(entry) for key, entry in value.items()}
            if isinstance(value, list | tuple):
                return [plain(entry) for entry in value]
            return None if isinstance(value, float) and not np.isfinite(value) else value

        return dict(plain(dataclasses.asdict(self)))


def summarize(timeline: Timeline, counts: SpanCounts | None = None) -> Summary:
    """Numbers of a Timeline in ns. counts: of the timeline by default."""
    counts = SpanCounts.of(timeline) if counts is None else counts
    return Summary(
        title=timeline.title,
        aligned=timeline.aligned,
        num_spans=int(counts.spans.sum()),
        num_flows=counts.num_flows,
        duration_ns=max((extent.last - extent.first for extent in counts.extent.values()), default=0),
        ranks=tuple(_ranks(timeline, counts)),
        problems=count_problems(timeline.problems),
    )


def _ranks(timeline: Timeline, counts: SpanCounts) -> Iterator[RankSummary]:
    tracks, launches = dict[int, list[int]](), dict[int, list[Launch]]()
    for number, rank in enumerate(timeline.track_ranks().tolist()):
        tracks.setdefault(rank, []).append(number)
    for launch in timeline.launches:
        launches.setdefault(launch.rank, []).append(launch)
    for about in timeline.ranks:
        yield _rank(timeline, about, tracks.get(about.rank, []), launches.get(about.rank, []), counts)


def _rank(
    timeline: Timeline, about: Rank, of_rank: Sequence[int], launches: Sequence[Launch], counts: SpanCounts
) -> RankSummary:
    """of_rank: its tracks."""
    tracks, rank = [timeline.tracks[number] for number in of_rank], about.rank
    kinds = [track.kind for track in tracks]
    busy = int(counts.busy_ns[of_rank].sum())
    lossy = [launch for launch in launches if launch.records_lost]
    return RankSummary(
        rank=rank,
        node=about.node,
        host=str(about.metadata.get("node", about.node)),
        machine=str(about.metadata.get("machine", "")),
        nics=_nics(tracks),
        device=about.device,
        backend=about.backend,
        state=about.state,
        num_launches=len(launches),
        num_device_tracks=kinds.count(TrackKind.DEVICE),
        num_host_tracks=kinds.count(TrackKind.HOST),
        num_spans=int(counts.spans[of_rank].sum()),
        num_marks=int(counts.marks[of_rank].sum()),
        num_open_spans=int(counts.open_spans[of_rank].sum()),
        records_lost=sum(launch.records_lost for launch in lossy),
        has_lost_more=any(p.rank == rank and p.kind in UNCOUNTED_LOSS_KINDS for p in timeline.problems),
        records_per_track=min((launch.records_per_track for launch in lossy or launches), default=0),
        records_needed=max((launch.records_needed for launch in launches), default=0) if lossy else 0,
        wait_share=int(counts.wait_ns[of_rank].sum()) / busy if busy else float("nan"),
        clock_method=about.clock.method if about.clock else "none",
        clock_hard_ns=about.clock.hard_ns if about.clock else float("nan"),
        clock_round_trip_ns=about.clock.round_trip_ns if about.clock else None,
        clock_sigma_ns=min(about.clock.sigma_ns, about.clock.hard_ns) if about.clock else float("nan"),
        clock_doubt_ns=about.clock.doubt_ns if about.clock else float("nan"),
        clock_is_checked=about.clock is not None and about.clock.is_checked,
        clock_of_rank=int(clocks_of_ranks(timeline.ranks)[rank]),
        events=_events(timeline, rank, counts),
    )


def _nics(tracks: Sequence[Track]) -> tuple[str, ...]:
    """What follows the number in the names of its engines' tracks: "domain 0 tcp 10.0.0.1"."""
    roles = {track.role for track in tracks if track.kind is TrackKind.ENGINE}
    return tuple(sorted({role.split(maxsplit=2)[-1] for role in roles if role.startswith("domain ")}))


def _events(timeline: Timeline, rank: int, counts: SpanCounts) -> tuple[EventSummary, ...]:
    summaries = []
    for number, about in enumerate(timeline.events):
        found = counts.events.get((rank, number))
        if found is None:
            continue
        summaries.append(
            EventSummary(
                event=about.name,
                event_class=about.event_class.value,
                count=found.count,
                total_ns=found.total_ns,
                longest_ns=found.longest_ns,
                longest_peer=found.peer,
            )
        )
    return tuple(summaries)
