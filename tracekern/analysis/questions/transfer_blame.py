"""Which rank, proxy, queue or link held up waits for transfers longer than its peers do.

All writes that waits were for are compared, whether they released them or came before: who is late hides what the
others take, but not from this. Iterations are not on record: the k-th waits of all ranks make a *piece*, or where there
are many, equal numbers of consecutive ones. From there it is the one test against chance (why/chance.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.groups import group_rows
from tracekern.analysis.questions.transfers import TransferCause, TransferWaits
from tracekern.analysis.why.answer import MIN_SHARE
from tracekern.analysis.why.chance import MIN_FOR_PATTERNS, MIN_ITERATIONS, Measure, beside_peers, search
from tracekern.timeline.model import Float64, Int64

_MOST_PIECES = MIN_FOR_PATTERNS - 1
"""What repeats in some of the waits only is not looked for."""


@dataclass(frozen=True)
class TransferBlame:
    """Waiting that one rank, queue or link held up."""

    cause: TransferCause
    rank: int
    """The sender; of NOTICED the waiter."""
    peer: int
    """The receiver, of UNDER_WAY; else -1."""
    domain: str
    """What the write went through, for QUEUED and UNDER_WAY; else ""."""
    waited_ns: int
    num_waits: int
    excess_ns: float = 0.0
    """How much longer a write of its takes than one of its peers, on average; 0 where that does not stand out."""
    alike_ns: float = 0.0
    """Peers that are all alike would show less than this."""

    @property
    def beyond_ns(self) -> float:
        """How much of the waiting that is."""
        return min(self.excess_ns * self.num_waits, self.waited_ns)


@dataclass(frozen=True)
class TransferBlames:
    every: tuple[TransferBlame, ...]
    """Those that stand out first, by how much; then those that held up most."""
    senders: tuple[int, ...]
    """The ranks whose writes were waited for."""
    num_compared: int
    """Largest number of peers that took part in as many pieces as a judgement needs."""

    @property
    def named(self) -> tuple[TransferBlame, ...]:
        return tuple(blame for blame in self.every if blame.excess_ns)


def blame_transfers(waits: TransferWaits) -> TransferBlames:
    """Says for each rank, queue and link how much waiting it held up, and names those that stand out for 1 % of it."""
    writes, none, worth_ns = waits.writes, np.full(len(waits.writes), -1), MIN_SHARE * float(waits.wait_ns.sum())
    members = {
        TransferCause.LATE: (writes.source, none, none),
        TransferCause.NOT_TAKEN: (writes.source, none, none),
        TransferCause.QUEUED: (writes.source, none, writes.domain),
        TransferCause.UNDER_WAY: (writes.source, writes.rank, writes.domain),
        TransferCause.NOTICED: (writes.rank, none, none),
    }
    piece, blames, num_compared = _pieces(waits), list[TransferBlame](), 0
    for cause, columns in members.items():
        groups = group_rows(len(writes), *columns)
        table = _mean(groups.group, piece[writes.wait], writes.of(cause), (len(groups), _MOST_PIECES))
        table = table[:, : int(piece.max(initial=-1)) + 1]
        held_up = np.bincount(groups.group[writes.released], waits.of(cause)[writes.wait[writes.released]], len(groups))
        number = np.bincount(groups.group[writes.released], minlength=len(groups))
        compared = np.flatnonzero(np.isfinite(table).sum(axis=1) >= MIN_ITERATIONS)
        num_compared = max(num_compared, len(compared))
        named = _stand_out(table[compared], cause.value, waits.doubt_ns)
        by_group = {int(compared[member]): found for member, found in named.items()}
        for group, (rank, peer, domain) in enumerate(zip(*(column.tolist() for column in groups.columns), strict=True)):
            excess = by_group.get(group, (0.0, 0.0))
            excess = excess if excess[0] * number[group] >= worth_ns else (0.0, 0.0)
            name = waits.domains[domain] if domain >= 0 else ""
            blames.append(TransferBlame(cause, rank, peer, name, int(held_up[group]), int(number[group]), *excess))
    every = sorted((one for one in blames if one.waited_ns), key=lambda one: (-one.beyond_ns, -one.waited_ns))
    return TransferBlames(tuple(every), tuple(np.unique(writes.source).tolist()), num_compared)


def _stand_out(table: Float64, name: str, doubt_ns: float) -> dict[int, tuple[float, float]]:
    """Member of [num_members, num_pieces] -> (by how much it exceeds its peers, what peers that are alike show)."""
    found: dict[int, tuple[float, float]] = {}
    if len(table) < 2:
        return found
    with_peers = ~np.isnan(table).all(axis=0)
    table = table[:, with_peers]
    table = np.where(np.isfinite(table), table, np.nanmedian(table, axis=0))
    for seed in range(len(table)):
        seen = search(Measure(name, beside_peers(table), doubt_ns, has_sets=False), seed)
        if seen is None or not seen.stands_out or seen.excess_ns <= doubt_ns:
            break
        (member,) = seen.members.tolist()
        found[member] = seen.excess_ns, seen.alike_ns
        table[member] = np.median(np.delete(table, member, axis=0), axis=0)
    return found


def _pieces(waits: TransferWaits) -> Int64:
    """[num_waits] the piece that each is of."""
    order = np.lexsort((waits.end, waits.rank))
    first = np.searchsorted(waits.rank[order], waits.rank)
    ordinal = np.empty(len(waits), np.int64)
    ordinal[order] = np.arange(len(waits))
    ordinal -= first
    count = np.bincount(waits.rank)[waits.rank] if len(waits) else ordinal
    num_pieces = min(int(count.max(initial=0)), _MOST_PIECES)
    return np.asarray(ordinal * num_pieces // np.maximum(count, 1), np.int64)


def _mean(row: Int64, column: Int64, value: Float64, shape: tuple[int, int]) -> Float64:
    """[shape] the mean of known values; nan where there are none."""
    known = np.isfinite(value)
    cell = (row * shape[1] + column)[known]
    sums, number = (np.bincount(cell, weight, shape[0] * shape[1]) for weight in (value[known], None))
    means: Float64 = np.divide(sums, number, out=np.full(len(sums), np.nan), where=number > 0)
    return means.reshape(shape)
