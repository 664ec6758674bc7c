"""What a Timeline holds, rank by rank: counts, losses, clock bounds, and how much of the time was waiting."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.formatting import brief
from tracekern.timeline.columns import parts_by_track
from tracekern.timeline.facts.open_spans import end_waits
from tracekern.timeline.intervals import exposed
from tracekern.timeline.model import (
    OPEN_END,
    UNCOUNTED_LOSS_KINDS,
    EventClass,
    Spans,
    Timeline,
    TrackKind,
    clocks_of_ranks,
    count_problems,
    field_values,
)


@dataclass
class EventCount:
    """Spans of one event on the device tracks of one rank; one that never closed lasts 0 ns, but for waits."""

    count: int
    total_ns: int
    longest_ns: int
    longest: int
    """The first of the longest: index into Timeline.spans."""


class SpanCounts:
    """Arrays are [num_tracks]; times are those of device tracks alone, 0 for others."""

    def __init__(self, timeline: Timeline) -> None:
        num_tracks = len(timeline.tracks)
        self.spans = np.diff(np.searchsorted(timeline.spans.track, np.arange(num_tracks + 1, dtype=np.int32)))
        self.open_spans = np.bincount(timeline.spans.track[timeline.spans.is_open], minlength=num_tracks)
        self.busy_ns = np.zeros(num_tracks, np.int64)
        """Time in closed spans and endless waits. Time in several at once counts once."""
        self.wait_ns = np.zeros(num_tracks, np.int64)
        """Time in waits, likewise."""
        self.events: dict[tuple[int, int], EventCount] = {}
        """(rank, number of the event) -> its spans."""
        self._rank_of_track = timeline.track_ranks()
        self._is_device = timeline.tracks_of(TrackKind.DEVICE)
        self._is_wait = timeline.events_of(EventClass.WAIT)
        for start, spans in parts_by_track(end_waits(timeline).spans):
            self._add_tracks(spans)
            self._add_events(start, spans)

    def _add_tracks(self, spans: Spans) -> None:
        first = np.flatnonzero(np.append(True, spans.track[1:] != spans.track[:-1]))
        track, closed = spans.track[first], spans.end != OPEN_END
        closed &= self._is_device[spans.track]
        self.busy_ns[track] = np.add.reduceat(exposed(spans, closed), first)
        self.wait_ns[track] = np.add.reduceat(exposed(spans, closed & self._is_wait[spans.event]), first)

    def _add_events(self, start: int, spans: Spans) -> None:
        """start: index of the first of `spans` in the Timeline."""
        row = np.flatnonzero(self._is_device[spans.track])
        groups = group_rows(len(row), self._rank_of_track[spans.track[row]], spans.event[row])
        duration = np.where(spans.end[row] == OPEN_END, 0, spans.end[row] - spans.start[row])
        longest_ns = groups.largest(duration)
        candidates = np.flatnonzero(duration == longest_ns[groups.group])[::-1]
        longest = np.empty(len(groups), np.int64)
        longest[groups.group[candidates]] = row[candidates] + start  # from the back: the first stays
        columns = (*groups.columns, groups.count(), groups.sum(duration), longest_ns, longest)
        for rank, event, *numbers in zip(*(column.tolist() for column in columns), strict=True):
            found = EventCount(*numbers)
            if before := self.events.get((rank, event)):
                found.count += before.count
                found.total_ns += before.total_ns
                if before.longest_ns >= found.longest_ns:
                    found.longest_ns, found.longest = before.longest_ns, before.longest
            self.events[rank, event] = found


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


def summarize(timeline: Timeline) -> Summary:
    """Numbers of a Timeline in ns."""
    counts = SpanCounts(timeline)
    return Summary(
        title=timeline.title,
        aligned=timeline.aligned,
        num_spans=len(timeline.spans),
        num_flows=len(timeline.flows),
        duration_ns=_duration_ns(timeline),
        ranks=tuple(_rank(timeline, rank.rank, counts) for rank in timeline.ranks),
        problems=count_problems(timeline.problems),
    )


def _duration_ns(timeline: Timeline) -> int:
    """From the first event to the last; without common clocks that of the rank that took longest by its own."""
    spans, marks = timeline.spans, timeline.marks
    starts, ends = np.append(spans.start, marks.time), np.append(np.maximum(spans.start, spans.end), marks.time)
    if timeline.aligned:
        return int(ends.max() - starts.min()) if len(starts) else 0
    of_rank = timeline.track_ranks()[np.append(spans.track, marks.track)]
    of_rank = np.where(timeline.tracks_of(TrackKind.HOST)[np.append(spans.track, marks.track)], -1, of_rank)
    mine = [of_rank == rank.rank for rank in timeline.ranks]
    return max((int(ends[rows].max() - starts[rows].min()) for rows in mine if rows.any()), default=0)


def _rank(timeline: Timeline, rank: int, counts: SpanCounts) -> RankSummary:
    about = next(entry for entry in timeline.ranks if entry.rank == rank)
    kinds = [track.kind for track in timeline.tracks if track.rank == rank]
    launches = [launch for launch in timeline.launches if launch.rank == rank]
    of_rank = timeline.track_ranks() == rank
    busy = int(counts.busy_ns[of_rank].sum())
    lossy = [launch for launch in launches if launch.records_lost]
    return RankSummary(
        rank=rank,
        node=about.node,
        host=str(about.metadata.get("node", about.node)),
        machine=str(about.metadata.get("machine", "")),
        nics=_nics(timeline, rank),
        device=about.device,
        backend=about.backend,
        state=about.state,
        num_launches=len(launches),
        num_device_tracks=kinds.count(TrackKind.DEVICE),
        num_host_tracks=kinds.count(TrackKind.HOST),
        num_spans=int(counts.spans[of_rank].sum()),
        num_marks=int(of_rank[timeline.marks.track].sum()),
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


def _nics(timeline: Timeline, rank: int) -> tuple[str, ...]:
    """What follows the number in the names of its engines' tracks: "domain 0 tcp 10.0.0.1"."""
    roles = {track.role for track in timeline.tracks if track.rank == rank and track.kind is TrackKind.ENGINE}
    return tuple(sorted({role.split(maxsplit=2)[-1] for role in roles if role.startswith("domain ")}))


def _events(timeline: Timeline, rank: int, counts: SpanCounts) -> tuple[EventSummary, ...]:
    summaries = []
    for number, about in enumerate(timeline.events):
        found = counts.events.get((rank, number))
        if found is None:
            continue
        peer = field_values(about, "peer", timeline.spans, [found.longest])
        summaries.append(
            EventSummary(
                event=about.name,
                event_class=about.event_class.value,
                count=found.count,
                total_ns=found.total_ns,
                longest_ns=found.longest_ns,
                longest_peer=-1 if peer is None else int(peer[0]),
            )
        )
    return tuple(summaries)
