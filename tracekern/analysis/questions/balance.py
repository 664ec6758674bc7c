"""Is the load even? Tokens and busy time per rank, block, expert and role; links; communication hidden by compute.

What a span moves is read off its event: one of work with a field `peer` moves one token, to the peer, or from it where
its name begins with `receive_`. One with a field `expert` and no peer is the expert's own compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.analysis.graph.activity import own_times
from tracekern.analysis.groups import group_rows
from tracekern.analysis.partial import Partial, Sums
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
    Spans,
    Timeline,
    TrackKind,
    unpack_field,
)

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
            found.append(EventRows(number, about, row, ranks[spans.track[row]]))
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


@dataclass(frozen=True)
class BalanceSums(Partial):
    """What a Balance is made of. Loads are `count` and `own_ns` of the spans of one event and place, by rank, place,
    and whether the event is a wait, sends, or takes; see EventRows."""

    of_tracks: Sums
    of_roles: Sums
    of_experts: Sums
    at_home: Sums
    """The same of ranks that receive tokens of an expert, or compute for it."""
    links: Sums
    """`tokens` and `busy_ns` by source and destination."""
    communication_ns: Int64
    """[largest rank + 1] in which at least one warp was moving tokens or signalling, ..."""
    compute_ns: Int64
    """... worked for an expert, ..."""
    either_ns: Int64
    """... or one of both."""

    @classmethod
    def of(cls, timeline: Timeline) -> BalanceSums:
        events, own_ns = rows_by_event(timeline), own_times(timeline)
        role, _ = roles_of(timeline, timeline.spans)
        of_experts = [event for event in events if event.is_work and event.names_expert]
        at_home = [event for event in of_experts if event.takes or event.computes]
        moves = [event for event in events if event.sends or event.takes or event.is_signal]
        computes = [event for event in events if event.computes]

        def covered(chosen: Sequence[EventRows]) -> Int64:
            rank, row = join_columns(((event.rank, event.row) for event in chosen), 2)
            return union_ns(timeline.spans, row, rank, max((one.rank for one in timeline.ranks), default=-1) + 1)

        communication, compute = covered(moves), covered(computes)
        either = covered(moves + computes) if moves and computes else communication + compute
        return cls(
            _loads(events, [timeline.spans.track[event.row] for event in events], own_ns),
            _loads(events, [role[event.row] for event in events], own_ns),
            _loads(of_experts, [timeline.field(event.row, "expert") for event in of_experts], own_ns),
            _loads(at_home, [timeline.field(event.row, "expert") for event in at_home], own_ns),
            _links(timeline, events),
            communication,
            compute,
            either,
        )


def analyze_balance(
    timeline: Timeline, link_limit: LinkLimit | None = None, sums: BalanceSums | None = None
) -> Balance:
    """Works on unaligned Timelines too: nothing is compared across ranks.

    link_limit: GB/s that a link was measured to reach, one number or one a (source, destination); None takes
    `link_gb_per_s` of the capture's settings, where that is a number. sums: of the timeline by default.
    """
    sums = BalanceSums.of(timeline) if sums is None else sums
    settings = timeline.ranks[0].metadata.get("settings") if timeline.ranks else None
    if not isinstance(settings, dict):
        settings = {}
    if link_limit is None and isinstance(settings.get("link_gb_per_s"), int | float):
        link_limit = float(settings["link_gb_per_s"])
    block = np.array([track.block for track in timeline.tracks] or [0], np.int64)
    _, roles = roles_of(timeline, Spans())
    of_tracks, of_roles = sums.of_tracks, sums.of_roles
    experts, joined = _expert_loads(sums), joined_ranks(timeline)
    return Balance(
        ranks=_with_idle_ranks(timeline, _by_key(of_tracks, np.zeros_like(of_tracks.keys[1]), [""])),
        blocks=_by_key(of_tracks, block[of_tracks.keys[1]]),
        joined=joined,
        experts=experts,
        num_experts=_num_experts(timeline, settings, experts, joined),
        roles=_by_key(of_roles, of_roles.keys[1], roles),
        links=_rated(sums.links, _token_bytes(settings), link_limit),
        overlaps=_overlaps(timeline, sums),
    )


def _loads(events: Sequence[EventRows], places: Sequence[Int64 | Int32], own_ns: Int64) -> Sums:
    """Sums up the spans of each event by rank and place. places: [n] the place of each span of an event."""
    parts = [Sums.of(tuple(np.empty((5, 0), np.int64)), count=np.empty(0), own_ns=np.empty(0))]
    for event, place in zip(events, places, strict=True):
        sums = Sums.of((event.rank, place), count=np.ones(len(place), np.int64), own_ns=own_ns[event.row])
        flags = (np.full(len(sums), int(flag)) for flag in (event.is_wait, event.sends, event.takes))
        parts.append(Sums((*sums.keys, *flags), sums.values))
    return Sums.total(parts)


def _by_key(loads: Sums, key: Int64, names: Sequence[str] | None = None) -> tuple[WorkLoad, ...]:
    """One for each (rank, key); `names` of the keys, by default their number."""
    rank, _, is_wait, sends, takes = loads.keys
    count, own_ns = loads["count"], loads["own_ns"]
    found = Sums.of(
        (rank, key),
        count=np.where(is_wait, 0, count),
        busy_ns=np.where(is_wait, 0, own_ns),
        wait_ns=np.where(is_wait, own_ns, 0),
        sent=np.where(sends, count, 0),
        taken=np.where(takes, count, 0),
    )
    return tuple(WorkLoad(rank, names[place] if names else str(place), *sums) for rank, place, *sums in found.rows())


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


def _expert_loads(sums: BalanceSums) -> tuple[WorkLoad, ...]:
    """All work for experts on the ranks where they live: those that receive their tokens, or compute for them."""
    home = {*zip(*(column.tolist() for column in sums.at_home.keys[:2]), strict=True)}
    rank, expert = (column.tolist() for column in sums.of_experts.keys[:2])
    is_home = np.array([place in home for place in zip(rank, expert, strict=True)], bool)
    loads = sums.of_experts.take(is_home)
    return _by_key(loads, loads.keys[1])


def _links(timeline: Timeline, events: Sequence[EventRows]) -> Sums:
    """Sums up what goes from one rank to another."""
    parts = []
    for event in events:
        if event.sends or (event.is_signal and event.has("peer")):
            peer = event.field(timeline, "peer")
            away = np.flatnonzero(peer != event.rank)
            parts.append((event.row[away], event.rank[away], peer[away], np.full(len(away), int(event.sends))))
    row, source, destination, tokens = join_columns(parts, 4)
    links = group_rows(len(row), source, destination)
    busy_ns = union_ns(timeline.spans, row, links.group, len(links))
    return Sums(links.columns, {"tokens": links.sum(tokens), "busy_ns": busy_ns})


def _rated(links: Sums, token_bytes: int | None, limit: LinkLimit | None) -> tuple[Link, ...]:
    """Links with their rates, the busiest first."""
    found = []
    for source, destination, num_tokens, ns in links.rows():
        size = num_tokens * token_bytes if token_bytes is not None else None
        of_pair = limit.get((source, destination)) if isinstance(limit, Mapping) else limit
        rate = size / ns if size is not None and ns else None
        found.append(Link(source, destination, num_tokens, size, ns, rate, of_pair))
    return tuple(sorted(found, key=lambda link: -link.busy_ns))


def _overlaps(timeline: Timeline, sums: BalanceSums) -> tuple[Overlap, ...]:
    """Both together cover what one alone does, plus the other, less what they share."""
    both = sums.communication_ns + sums.compute_ns - sums.either_ns
    return tuple(
        Overlap(rank, int(sums.communication_ns[rank]), int(both[rank]))
        for rank in sorted(entry.rank for entry in timeline.ranks)
    )
