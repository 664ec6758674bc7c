"""What came from where: tokens of each (local expert, source rank) that a rank received, and what they cost.

A kernel that receives expert by expert says so in the fields of its events, whatever their names: a wait with `peer`
and `local_expert` that ends with `tokens` waited for the count of a pair, and a span of work with `src_rank` and
`local_expert` that ends with `token` copied one token of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.partial import Sums
from tracekern.analysis.questions.balance import EventRows, join_columns, rows_by_event
from tracekern.timeline.model import Int64, Timeline, unpack_field
from tracekern.timeline.table import Table


@dataclass(frozen=True, repr=False)
class ReceiveMatrix(Table):
    """[n] the pairs (local expert, source rank) of all receiving ranks, by rank, local expert and source."""

    rank: Int64
    """The rank that receives."""
    local_expert: Int64
    source: Int64
    waits: Int64
    """How often the count of the pair was waited for: once a call."""
    tokens: Int64
    """Sum of the counts that came."""
    wait_ns: Int64
    copies: Int64
    """Tokens that were copied; fewer than `tokens` where spans were not recorded."""
    copy_ns: Int64
    """Time in copies, summed over warps."""

    @property
    def sources(self) -> Int64:
        """[num_sources] ascending."""
        return np.unique(self.source)

    @property
    def rows(self) -> tuple[Int64, Int64]:
        """([num_rows] rank, [num_rows] local expert) of all experts that received, in the order of the pairs."""
        rank, local_expert = group_rows(len(self), self.rank, self.local_expert).columns
        return rank, local_expert

    def grid(self, values: Int64) -> Int64:
        """Returns [num_rows, num_sources] the values of the pairs; 0 for a pair that there is not.

        values: one of the columns, or [n] of the same order.
        """
        row = group_rows(len(self), self.rank, self.local_expert).group
        grid = np.zeros((int(row.max(initial=-1)) + 1, len(self.sources)), np.int64)
        grid[row, np.searchsorted(self.sources, self.source)] = values
        return grid

    def of_rank(self, rank: int) -> ReceiveMatrix:
        """Returns the pairs of one receiving rank."""
        return self.take(self.rank == rank)


def receive_matrix(timeline: Timeline, received: Sums | None = None) -> ReceiveMatrix | None:
    """Sums up waits and copies by pair. None where the timeline has no such waits that ended.

    Works on unaligned Timelines too: nothing is compared across ranks. received: sums_of_pairs(), of the timeline by
    default.
    """
    received = sums_of_pairs(timeline) if received is None else received
    return ReceiveMatrix(*received.keys, **received.values) if received["waits"].any() else None


def sums_of_pairs(timeline: Timeline) -> Sums:
    """The columns of a ReceiveMatrix, by its first three."""
    events = rows_by_event(timeline)
    waits, copies = ([event for event in events if is_it(event)] for is_it in (_waits_for_count, _copies))
    parts = [*_parts(timeline, waits, source="peer"), *_parts(timeline, copies, source="src_rank")]
    rank, local_expert, source, tokens, is_wait, ns = join_columns(parts, 6)
    is_wait = is_wait.astype(bool)
    return Sums.of(
        (rank, local_expert, source),
        waits=is_wait,
        tokens=tokens,
        wait_ns=np.where(is_wait, ns, 0),
        copies=~is_wait,
        copy_ns=np.where(is_wait, 0, ns),
    )


def _waits_for_count(event: EventRows) -> bool:
    return event.is_wait and event.has("peer") and event.has("local_expert") and _ends_with(event, "tokens")


def _copies(event: EventRows) -> bool:
    return event.is_work and event.has("src_rank") and event.has("local_expert") and _ends_with(event, "token")


def _ends_with(event: EventRows, name: str) -> bool:
    return any(field.name == name for field in event.about.end_fields)


def _parts(timeline: Timeline, events: Sequence[EventRows], source: str) -> list[tuple[Any, ...]]:
    """Columns of the spans of each event: rank, local expert, source, tokens of a count, is_wait, ns."""
    spans = timeline.spans
    parts = []
    for event in events:
        row = event.row
        tokens = np.zeros(len(row), np.int64)
        if event.is_wait:
            tokens = unpack_field(event.about.end_fields, "tokens", spans.end_payload[row])
        pair = event.field(timeline, "local_expert"), event.field(timeline, source)
        ns = spans.end[row] - spans.start[row]
        parts.append((event.rank.astype(np.int64), *pair, tokens, np.full(len(row), event.is_wait), ns))
    return parts
