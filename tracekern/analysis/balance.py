"""Is the load even? Tokens and busy time per rank, block, expert and role; links; communication hidden by compute.

What a span moves is read off its event: one of work with a field `peer` moves one token, to the peer, or from it where
its name begins with `receive_`. One with a field `expert` and no peer is the expert's own compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.analysis.balance_spans import Mask, Spans, describe_spans, own_times
from tracekern.analysis.balance_unions import union_ns
from tracekern.analysis.event_activity import flatten
from tracekern.analysis.groups import group_rows
from tracekern.timeline.model import Int64, Timeline

BYTES_OF_DTYPE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}

LinkLimit = float | Mapping[tuple[int, int], float]
"""GB/s that a link was measured to reach: of every pair, or by (source, destination)."""


@dataclass(frozen=True)
class Load:
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
    """Of one rank, over all its warps."""

    rank: int
    communication_ns: int
    """Time in which at least one warp was moving tokens or signalling."""
    compute_ns: int
    """Time in which at least one warp worked for an expert."""
    both_ns: int

    @property
    def share(self) -> float:
        """Part of the communication that is hidden behind compute, 0..1; nan without communication."""
        return self.both_ns / self.communication_ns if self.communication_ns else float("nan")


@dataclass(frozen=True)
class Balance:
    ranks: tuple[Load, ...]
    blocks: tuple[Load, ...]
    experts: tuple[Load, ...]
    roles: tuple[Load, ...]
    links: tuple[Link, ...]
    """Between different ranks, busiest first."""
    overlaps: tuple[Overlap, ...]
    token_bytes: int | None
    """From the capture's settings `hidden` and `dtype`; None where they do not say."""


def load_imbalance(loads: tuple[Load, ...]) -> float:
    """Largest busy time over the mean; nan where nobody was busy."""
    busy = [load.busy_ns for load in loads]
    return max(busy) * len(busy) / sum(busy) if sum(busy) else float("nan")


def analyze_balance(timeline: Timeline, link_limit: LinkLimit | None = None) -> Balance:
    """Works on unaligned Timelines too: nothing is compared across ranks.

    link_limit: None takes `link_gb_per_s` of the capture's settings, if it is there.
    """
    spans = describe_spans(timeline)
    own_ns = own_times(timeline, flatten(timeline), spans.row)
    settings = timeline.ranks[0].metadata.get("settings", {}) if timeline.ranks else {}
    token_bytes = _token_bytes(settings)
    if link_limit is None:
        link_limit = settings.get("link_gb_per_s")
    everything = np.ones(len(spans.row), bool)
    block_of_track = np.array([track.block for track in timeline.tracks] or [0], np.int64)
    roles = sorted({track.role for track in timeline.tracks})
    role_of_track = np.array([roles.index(track.role) for track in timeline.tracks] or [0], np.int64)
    return Balance(
        ranks=_loads(spans, own_ns, everything, np.zeros(len(spans.row), np.int64), [""]),
        blocks=_loads(spans, own_ns, everything, block_of_track[spans.track]),
        experts=_loads(spans, own_ns, _at_home(spans), spans.expert),
        roles=_loads(spans, own_ns, everything, role_of_track[spans.track], roles),
        links=_links(timeline, spans, token_bytes, link_limit),
        overlaps=_overlaps(timeline, spans),
        token_bytes=token_bytes,
    )


def _token_bytes(settings: Mapping[str, Any]) -> int | None:
    hidden, size = settings.get("hidden"), BYTES_OF_DTYPE.get(str(settings.get("dtype")))
    return hidden * size if isinstance(hidden, int) and size else None


def _loads(spans: Spans, own_ns: Int64, chosen: Mask, key: Int64, names: list[str] | None = None) -> tuple[Load, ...]:
    """One for each (rank, key) of the spans `chosen`; `names` of the keys, by default their number."""
    which = np.flatnonzero(chosen)
    groups = group_rows(len(which), spans.rank[which], key[which])
    sums = (
        groups.sum(values[which])
        for values in (~spans.is_wait, np.where(spans.is_wait, 0, own_ns), own_ns, spans.sends, spans.takes)
    )
    table = zip(*(column.tolist() for column in (*groups.columns, *sums)), strict=True)
    return tuple(
        Load(rank, names[number] if names else str(number), count, busy, total - busy, sent, received)
        for rank, number, count, busy, total, sent, received in table
    )


def _at_home(spans: Spans) -> Mask:
    """Work for experts on the ranks where they live: those that receive their tokens, or compute for them."""
    lives = np.flatnonzero((spans.takes | spans.computes) & (spans.expert >= 0))
    num_experts = int(spans.expert.max(initial=-1)) + 1
    homes = np.unique(spans.rank[lives] * num_experts + spans.expert[lives])
    return spans.is_work & (spans.expert >= 0) & np.isin(spans.rank * num_experts + spans.expert, homes)


def _links(timeline: Timeline, spans: Spans, token_bytes: int | None, limit: LinkLimit | None) -> tuple[Link, ...]:
    outgoing = (spans.sends | (spans.is_signal & (spans.peer >= 0))) & (spans.peer != spans.rank)
    which = np.flatnonzero(outgoing)
    groups = group_rows(len(which), spans.rank[which], spans.peer[which])
    start, end = timeline.spans.start[spans.row[which]], timeline.spans.end[spans.row[which]]
    busy = union_ns(groups.group, start, end, len(groups))
    table = zip(*(column.tolist() for column in (*groups.columns, groups.sum(spans.sends[which]), busy)), strict=True)
    links = []
    for source, destination, tokens, ns in table:
        size = tokens * token_bytes if token_bytes is not None else None
        of_pair = limit.get((source, destination)) if isinstance(limit, Mapping) else limit
        rate = size / ns if size is not None and ns else None
        links.append(Link(source, destination, tokens, size, ns, rate, of_pair))
    return tuple(sorted(links, key=lambda link: -link.busy_ns))


def _overlaps(timeline: Timeline, spans: Spans) -> tuple[Overlap, ...]:
    """Both together cover what one alone does, plus the other, less what they share."""
    count = max((rank.rank for rank in timeline.ranks), default=-1) + 1
    moves = spans.sends | spans.takes | spans.is_signal
    covered = []
    for chosen in (moves, spans.computes, moves | spans.computes):
        which = np.flatnonzero(chosen)
        row = spans.row[which]
        covered.append(union_ns(spans.rank[which], timeline.spans.start[row], timeline.spans.end[row], count))
    communication, compute, either = (column.tolist() for column in covered)
    return tuple(
        Overlap(rank, communication[rank], compute[rank], communication[rank] + compute[rank] - either[rank])
        for rank in sorted(entry.rank for entry in timeline.ranks)
    )
