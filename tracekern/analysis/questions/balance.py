"""Is the load even? Tokens and busy time per rank, block, expert and role; links; communication hidden by compute.

What a span moves is read off its event: one of work with a field `peer` moves one token, to the peer, or from it where
its name begins with `receive_`. One with a field `expert` and no peer is the expert's own compute.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.analysis.graph.activity import own_times
from tracekern.analysis.groups import group_rows
from tracekern.formatting import brief
from tracekern.timeline.facts.roles import roles_of
from tracekern.timeline.facts.stages import joined_ranks
from tracekern.timeline.intervals import union_ns
from tracekern.timeline.join.members import lacks_ranks
from tracekern.timeline.model import (
    OPEN_END,
    EventClass,
    EventType,
    Int32,
    Int64,
    Mask,
    Timeline,
    TrackKind,
    unpack_field,
)
from tracekern.timeline.table import Table

_RECEIVES = "receive_"


@dataclass(frozen=True)
class EventRows:
    """All closed device spans of one event, and what they do."""

    number: int
    """Index into Timeline.events."""
    about: EventType
    row: Int64
    """[n] index into Timeline.spans."""
    rank: Int32
    """[n]"""
    track: Int64
    """[m] the tracks that have any, ascending, ..."""
    first: Int64
    """... and where the spans of each begin in `row`."""

    @property
    def is_wait(self) -> bool:
        return self.about.event_class is EventClass.WAIT

    @property
    def is_work(self) -> bool:
        return self.about.event_class is EventClass.WORK

    @property
    def is_signal(self) -> bool:
        return self.about.event_class is EventClass.SIGNAL

    @property
    def sends(self) -> bool:
        """Moves a token to the peer."""
        return self.is_work and self.has("peer") and not self.about.name.startswith(_RECEIVES)

    @property
    def takes(self) -> bool:
        """Moves a token that came from the peer."""
        of_peer = self.has("peer") and self.about.name.startswith(_RECEIVES)
        return self.is_work and (of_peer or self.has("src_rank"))

    @property
    def computes(self) -> bool:
        """Works for an expert."""
        return self.is_work and self.names_expert and not self.has("peer")

    @property
    def names_expert(self) -> bool:
        """Says its expert, at its begin or, as a tile of a ring does, at its end."""
        return any(field.name == "expert" for field in (*self.about.begin_fields, *self.about.end_fields))

    def has(self, name: str) -> bool:
        return self.about.has(name)

    def field(self, timeline: Timeline, name: str) -> Int64:
        """[n] values of a begin field. Raises KeyError when there is none."""
        return unpack_field(self.about.begin_fields, name, timeline.spans.begin_payload[self.row])


def rows_by_event(timeline: Timeline) -> list[EventRows]:
    """One for each event that has closed spans on device tracks."""
    spans = timeline.spans
    is_device = timeline.tracks_of(TrackKind.DEVICE)
    usable = is_device[spans.track] & (spans.end != OPEN_END)
    event = np.where(usable, spans.event, -1).astype(np.min_scalar_type(-len(timeline.events) - 1))
    ranks = timeline.track_ranks()
    found = []
    for number, about in enumerate(timeline.events):
        row = np.flatnonzero(event == number)
        if len(row):
            track_of_row = spans.track[row]
            first = np.flatnonzero(np.append(True, track_of_row[1:] != track_of_row[:-1]))
            track = track_of_row[first].astype(np.int64)
            rank = np.repeat(ranks[track], np.diff(first, append=len(row)))
            found.append(EventRows(number, about, row, rank, track, first))
    return found


def join_columns(parts: Iterable[tuple[Any, ...]], count: int) -> list[Any]:
    """The `count` columns of all parts, one after the other."""
    listed = list(parts)
    return [np.concatenate([part[idx] for part in listed] or [np.empty(0, np.int64)]) for idx in range(count)]


BYTES_OF_DTYPE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}

LinkLimit = float | Mapping[tuple[int, int], float]
"""GB/s that a link was measured to reach: of every pair, or by (source, destination)."""


@dataclass(frozen=True)
class WorkLoad:
    """The work of one rank, or of one of its blocks, experts or roles."""

    rank: int
    name: str
    """Number of the block or expert, name of the role; empty for the rank."""
    num_spans: int
    busy_ns: int
    """Time in spans that are not waits, summed over warps; what lies inside another span counts once."""
    wait_ns: int
    tokens_sent: int
    tokens_received: int


@dataclass(frozen=True)
class Link:
    source: int
    destination: int
    tokens: int
    bytes: int | None
    """None where the capture does not say how large a token is."""
    busy_ns: int
    """Time in which at least one warp of the source was sending to the destination, or its stores were draining."""
    gb_per_s: float | None
    """bytes / busy_ns."""
    limit_gb_per_s: float | None

    @property
    def utilisation(self) -> float | None:
        """Part of the limit, 0..1 and beyond; None where either is not known."""
        if self.gb_per_s is None or not self.limit_gb_per_s:
            return None
        return self.gb_per_s / self.limit_gb_per_s


@dataclass(frozen=True)
class Overlap:
    """Sending and expert work of one rank, over all its warps."""

    rank: int
    communication_ns: int
    """Time in which at least one warp was moving tokens or signalling."""
    both_ns: int
    """The part of it in which at least one warp worked for an expert."""

    @property
    def share(self) -> float:
        """Part of the communication that is hidden behind compute, 0..1; nan without communication."""
        return self.both_ns / self.communication_ns if self.communication_ns else float("nan")


@dataclass(frozen=True)
class Balance:
    ranks: tuple[WorkLoad, ...]
    """All of the timeline, those that did nothing included."""
    joined: tuple[tuple[int, ...], ...]
    """The ranks that kernels join, from group to group. Others have a load of their own."""
    blocks: tuple[WorkLoad, ...]
    experts: tuple[WorkLoad, ...]
    """Those that have spans."""
    num_experts: int
    """`experts` of the capture's settings; as many as have spans where that is no number, or a rank is not here."""
    roles: tuple[WorkLoad, ...]
    links: tuple[Link, ...]
    """Between different ranks, busiest first."""
    overlaps: tuple[Overlap, ...]

    __repr__ = brief


def load_imbalance(loads: tuple[WorkLoad, ...]) -> float:
    """Largest busy time over the mean; nan where no rank was busy."""
    busy = [load.busy_ns for load in loads]
    return max(busy) * len(busy) / sum(busy) if sum(busy) else float("nan")


def most_uneven(loads: tuple[WorkLoad, ...], joined: Iterable[tuple[int, ...]]) -> tuple[float, WorkLoad]:
    """(load_imbalance, the busiest) of the ranks that kernels join whose loads differ most."""
    parts = [tuple(load for load in loads if load.rank in ranks) for ranks in joined]
    found = [(load_imbalance(part), max(part, key=lambda load: load.busy_ns)) for part in parts if part]
    return max(found, key=lambda one: (not math.isnan(one[0]), one[0]))


def analyze_balance(timeline: Timeline, link_limit: LinkLimit | None = None) -> Balance:
    """Works on unaligned Timelines too: nothing is compared across ranks.

    link_limit: GB/s that a link was measured to reach, one number or one a (source, destination); None takes
    `link_gb_per_s` of the capture's settings, where that is a number.
    """
    events = rows_by_event(timeline)
    settings = timeline.ranks[0].metadata.get("settings") if timeline.ranks else None
    if not isinstance(settings, dict):
        settings = {}
    if link_limit is None and isinstance(settings.get("link_gb_per_s"), int | float):
        link_limit = float(settings["link_gb_per_s"])
    own_ns = own_times(timeline)
    cells = _Cells.of_tracks(timeline, events, own_ns)
    block = np.array([track.block for track in timeline.tracks] or [0], np.int64)
    role, roles = roles_of(timeline, timeline.spans)
    in_roles = _Cells.of_roles(events, own_ns, role)
    experts, joined = _expert_loads(timeline, events, own_ns), joined_ranks(timeline)
    return Balance(
        ranks=_with_idle_ranks(timeline, cells.loads(np.zeros_like(cells.place), [""])),
        blocks=cells.loads(block[cells.place]),
        joined=joined,
        experts=experts,
        num_experts=_num_experts(timeline, settings, experts, joined),
        roles=in_roles.loads(in_roles.place, roles),
        links=_links(timeline, events, _token_bytes(settings), link_limit),
        overlaps=_overlaps(timeline, events),
    )


@dataclass(frozen=True, repr=False)
class _Cells(Table):
    """[n] sums over the spans of one event in one place of a rank."""

    rank: Int64
    place: Int64
    is_wait: Mask
    sends: Mask
    takes: Mask
    count: Int64
    own_ns: Int64

    @classmethod
    def of_tracks(cls, timeline: Timeline, events: Sequence[EventRows], own_ns: Int64) -> _Cells:
        """The place is the track."""
        ranks = timeline.track_ranks().astype(np.int64)
        parts = []
        for event in events:
            count = np.diff(event.first, append=len(event.row))
            ns = np.add.reduceat(own_ns[event.row], event.first)
            parts.append(cls._of(event, ranks[event.track], event.track, count, ns))
        return cls(*join_columns(parts, len(dataclasses.fields(cls))))

    @classmethod
    def of_experts(cls, timeline: Timeline, events: Sequence[EventRows], own_ns: Int64) -> _Cells:
        chosen = [event for event in events if event.is_work and event.names_expert]
        return cls._of_keys(chosen, [timeline.field(event.row, "expert") for event in chosen], own_ns)

    @classmethod
    def of_roles(cls, events: Sequence[EventRows], own_ns: Int64, role: Int32) -> _Cells:
        """role: [num_spans] of the timeline."""
        return cls._of_keys(events, [role[event.row] for event in events], own_ns)

    @classmethod
    def _of_keys(cls, events: Sequence[EventRows], keys: Sequence[Int64 | Int32], own_ns: Int64) -> _Cells:
        """keys: [n] the place of each span of an event."""
        parts = []
        for event, key in zip(events, keys, strict=True):
            groups = group_rows(len(event.row), event.rank, key)
            rank, place = groups.columns
            parts.append(cls._of(event, rank, place, groups.count(), groups.sum(own_ns[event.row])))
        return cls(*join_columns(parts, len(dataclasses.fields(cls))))

    @staticmethod
    def _of(event: EventRows, rank: Int64, place: Int64, count: Int64, own_ns: Int64) -> tuple[Any, ...]:
        flags = (np.full(len(rank), flag) for flag in (event.is_wait, event.sends, event.takes))
        return (rank, place, *flags, count, own_ns)

    def loads(self, key: Int64, names: Sequence[str] | None = None) -> tuple[WorkLoad, ...]:
        """One for each (rank, key); `names` of the keys, by default their number."""
        groups = group_rows(len(key), self.rank, key)
        weights = (
            np.where(self.is_wait, 0, self.count),
            np.where(self.is_wait, 0, self.own_ns),
            np.where(self.is_wait, self.own_ns, 0),
            np.where(self.sends, self.count, 0),
            np.where(self.takes, self.count, 0),
        )
        table = zip(*(column.tolist() for column in (*groups.columns, *map(groups.sum, weights))), strict=True)
        return tuple(WorkLoad(rank, names[place] if names else str(place), *sums) for rank, place, *sums in table)


def _token_bytes(settings: Mapping[str, Any]) -> int | None:
    """From the capture's settings `hidden` and `dtype`; None where they do not say."""
    hidden, size = settings.get("hidden"), BYTES_OF_DTYPE.get(str(settings.get("dtype")))
    return hidden * size if isinstance(hidden, int) and size else None


def _with_idle_ranks(timeline: Timeline, loads: tuple[WorkLoad, ...]) -> tuple[WorkLoad, ...]:
    idle = {rank.rank for rank in timeline.ranks} - {load.rank for load in loads}
    return tuple(sorted((*loads, *(WorkLoad(rank, "", 0, 0, 0, 0, 0) for rank in idle)), key=lambda load: load.rank))


def _num_experts(
    timeline: Timeline,
    settings: Mapping[str, Any],
    loads: tuple[WorkLoad, ...],
    joined: tuple[tuple[int, ...], ...],
) -> int:
    part = {rank: number for number, ranks in enumerate(joined) for rank in ranks}
    in_use = len({(part[load.rank], load.name) for load in loads})
    if len(joined) > 1:  # each may have as many as are named
        return in_use
    named = settings.get("experts")
    # What the experts of a rank got that is not here is not known: they did not get nothing.
    return max(named, in_use) if isinstance(named, int) and not lacks_ranks(timeline) else in_use


def _expert_loads(timeline: Timeline, events: Sequence[EventRows], own_ns: Int64) -> tuple[WorkLoad, ...]:
    """All work for experts on the ranks where they live: those that receive their tokens, or compute for them."""
    home = _Cells.of_experts(timeline, [event for event in events if event.takes or event.computes], own_ns)
    cells = _Cells.of_experts(timeline, events, own_ns)
    num_experts = int(cells.place.max(initial=-1)) + 1
    cells = cells.take(np.isin(cells.rank * num_experts + cells.place, home.rank * num_experts + home.place))
    return cells.loads(cells.place)


def _links(
    timeline: Timeline, events: Sequence[EventRows], token_bytes: int | None, limit: LinkLimit | None
) -> tuple[Link, ...]:
    parts = []
    for event in events:
        if event.sends or (event.is_signal and event.has("peer")):
            peer = event.field(timeline, "peer")
            away = np.flatnonzero(peer != event.rank)
            pairs = group_rows(len(away), event.rank[away], peer[away])
            tokens = pairs.count() if event.sends else np.zeros(len(pairs), np.int64)
            parts.append((event.row[away], pairs, tokens))
    source, destination, tokens = join_columns(((*pairs.columns, tokens) for _, pairs, tokens in parts), 3)
    every = group_rows(len(source), source, destination)
    first = np.cumsum([0, *(len(pairs) for _, pairs, _ in parts)])
    numbered = zip(first[:-1].tolist(), parts, strict=True)
    row, owner = join_columns(((row, every.group[start + pairs.group]) for start, (row, pairs, _) in numbered), 2)
    busy = union_ns(timeline.spans, row, owner, len(every))
    table = zip(*(column.tolist() for column in (*every.columns, every.sum(tokens), busy)), strict=True)
    links = []
    for source_rank, peer_rank, num_tokens, ns in table:
        size = num_tokens * token_bytes if token_bytes is not None else None
        of_pair = limit.get((source_rank, peer_rank)) if isinstance(limit, Mapping) else limit
        rate = size / ns if size is not None and ns else None
        links.append(Link(source_rank, peer_rank, num_tokens, size, ns, rate, of_pair))
    return tuple(sorted(links, key=lambda link: -link.busy_ns))


def _overlaps(timeline: Timeline, events: Sequence[EventRows]) -> tuple[Overlap, ...]:
    """Both together cover what one alone does, plus the other, less what they share."""
    count = max((rank.rank for rank in timeline.ranks), default=-1) + 1
    moves = [event for event in events if event.sends or event.takes or event.is_signal]
    computes = [event for event in events if event.computes]

    def covered(chosen: Sequence[EventRows]) -> Int64:
        rank, row = join_columns(((event.rank, event.row) for event in chosen), 2)
        return union_ns(timeline.spans, row, rank, count)

    communication, compute = covered(moves), covered(computes)
    either = covered(moves + computes) if moves and computes else communication + compute
    both = communication + compute - either
    return tuple(
        Overlap(rank, int(communication[rank]), int(both[rank]))
        for rank in sorted(entry.rank for entry in timeline.ranks)
    )
