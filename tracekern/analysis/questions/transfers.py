"""Why waits for immediates lasted: which transfer each was for, and what held that up.

Of the writes that a wait was for, the one that arrived last released it. Until its transfer was submitted the sender
was late; until it was posted it stood in a queue; until it arrived it was under way; what is left the receiver took to
see it. These are times of hosts, as recorded: they say where waiting went, not what a run would save.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from tracekern.timeline.join.immediates import find_arrivals, immediate_waits, releasing
from tracekern.timeline.model import OPEN_END, Int32, Int64, Mask, Timeline, TrackKind
from tracekern.timeline.table import Table

_TRANSFER, _NUMBER = "transfer", "transfer"


class TransferCause(enum.Enum):
    """What a wait was for at a moment."""

    LATE = "late"
    """The sender had not submitted the transfer."""
    QUEUED = "queued"
    """The write was not posted: others were before it, or the peer was not met yet."""
    UNDER_WAY = "under way"
    """It was posted and had not arrived."""
    NOTICED = "noticed"
    """It had arrived, and the receiver's worker, or the waiter, had not seen it."""


@dataclass(frozen=True, repr=False)
class TransferWaits(Table):
    """[n] columns: waits for immediates that ended. Their four parts add up to wait_ns."""

    row: Int64
    """Index into Timeline.spans."""
    rank: Int64
    source: Int64
    """The rank that wrote."""
    domain: Int64
    """Index into `domains`: what the write went through."""
    write: Int64
    """Its span."""
    transfer: Int64
    """Its transfer's span; -1 where that is not on record."""
    wait_ns: Int64
    late_ns: Int64
    queued_ns: Int64
    under_way_ns: Int64
    noticed_ns: Int64
    is_sure: Mask
    """Whether no other write can have released it."""
    domains: tuple[str, ...]
    num_unmatched: int
    """Waits that ended and whose write is not on record. They have no row."""

    def of(self, cause: TransferCause) -> Int64:
        """[n] ns of a cause."""
        ns: Int64 = getattr(self, f"{cause.name.lower()}_ns")
        return ns


@dataclass(frozen=True)
class TransferBlame:
    """Waiting that one rank, queue or link caused."""

    cause: TransferCause
    rank: int
    """The sender; of NOTICED the waiter."""
    peer: int
    """The receiver, of UNDER_WAY; else -1."""
    domain: str
    """Of QUEUED and UNDER_WAY; else ""."""
    waited_ns: int
    beyond_ns: int
    """How much more that is than what the median of its peers caused; they are the others of the same cause."""
    num_waits: int


def divide_transfer_waits(timeline: Timeline) -> TransferWaits | None:
    """Divides every wait for immediates; None for a timeline without transfer engines."""
    if not timeline.tracks_of(TrackKind.ENGINE).any():
        return None
    spans, ranks = timeline.spans, timeline.track_ranks().astype(np.int64)
    arrivals = find_arrivals(timeline)
    every = immediate_waits(timeline)
    arrival = releasing(timeline, arrivals, every)
    write = np.where(arrival >= 0, np.append(arrivals.write, -1)[arrival], -1)
    found = write >= 0
    row, arrival, write = every[found], arrival[found], write[found]
    transfer = _transfers_of(timeline, write)
    begin, end = spans.start[row], spans.end[row]
    # Its worker sees it when it polls; that it was there by the end of the write the sender knows.
    came, confirmed = arrivals.time[arrival], spans.end[write]
    moments = [
        np.where(transfer >= 0, spans.start[transfer], spans.start[write]) if len(spans) else write,
        spans.start[write],
        np.where(confirmed == OPEN_END, came, np.minimum(came, confirmed)),
        end,
    ]
    parts, before = [], begin
    for moment in moments:
        reached = np.clip(moment, before, end)
        parts.append(reached - before)
        before = reached
    roles = [track.role for track in timeline.tracks]
    domains = tuple(sorted({roles[track] for track in spans.track[write].tolist()}))
    return TransferWaits(
        row=row,
        rank=ranks[spans.track[row]],
        source=ranks[spans.track[write]],
        domain=np.array([domains.index(roles[track]) for track in spans.track[write].tolist()], np.int64),
        write=write,
        transfer=transfer,
        wait_ns=end - begin,
        late_ns=parts[0],
        queued_ns=parts[1],
        under_way_ns=parts[2],
        noticed_ns=parts[3],
        is_sure=arrivals.is_sure[arrival],
        domains=domains,
        num_unmatched=int((~found).sum()),
    )


def blame_transfers(waits: TransferWaits) -> tuple[TransferBlame, ...]:
    """Who caused how much waiting, those first that exceed their peers most."""
    none = np.full(len(waits), -1)
    keys = {
        TransferCause.LATE: (waits.source, none, none),
        TransferCause.QUEUED: (waits.source, none, waits.domain),
        TransferCause.UNDER_WAY: (waits.source, waits.rank, waits.domain),
        TransferCause.NOTICED: (waits.rank, none, none),
    }
    blames = []
    for cause, columns in keys.items():
        known, group = np.unique(np.stack(columns), axis=1, return_inverse=True)
        group = group.ravel()
        total = np.bincount(group, waits.of(cause), known.shape[1]).astype(np.int64)
        number = np.bincount(group, minlength=known.shape[1])
        for place, (rank, peer, domain) in enumerate(known.T.tolist()):
            others = np.delete(total, place)
            beyond = int(total[place] - (np.median(others) if len(others) else 0))
            name = waits.domains[domain] if domain >= 0 else ""
            blames.append(TransferBlame(cause, rank, peer, name, int(total[place]), beyond, int(number[place])))
    return tuple(sorted((blame for blame in blames if blame.waited_ns > 0), key=lambda blame: -blame.beyond_ns))


def _transfers_of(timeline: Timeline, writes: Int64) -> Int64:
    """[n] the span of the transfer that each write was part of; -1 where it is not on record.

    Of those of its engine with its number, which comes again after 8192 transfers, the last that began before it.
    """
    spans = timeline.spans
    names = np.array([event.name for event in timeline.events] or [""])
    is_engine = timeline.tracks_of(TrackKind.ENGINE)
    transfers = np.flatnonzero((names[spans.event] == _TRANSFER) & is_engine[spans.track])
    key, wanted = (_engine_and_number(timeline, rows) for rows in (transfers, writes))
    order = np.lexsort((spans.start[transfers], key))
    transfers, key = transfers[order], key[order]
    place = np.array(
        [
            first + np.searchsorted(spans.start[transfers[first:stop]], start, "right") - 1
            for first, stop, start in zip(
                np.searchsorted(key, wanted, "left").tolist(),
                np.searchsorted(key, wanted, "right").tolist(),
                spans.start[writes].tolist(),
                strict=True,
            )
        ],
        np.int64,
    )
    is_there = place >= np.searchsorted(key, wanted, "left")
    return np.where(is_there, np.append(transfers, -1)[place], -1)


def _engine_and_number(timeline: Timeline, rows: Int64) -> Int64:
    spans = timeline.spans
    engine = np.array([track.rank << 16 | track.stream for track in timeline.tracks] or [0], np.int64)
    number = np.zeros(len(rows), np.int64)
    events: Int32 = spans.event[rows]
    for idx in np.unique(events).tolist():
        mine = np.flatnonzero(events == idx)
        number[mine] = timeline.field(rows[mine], _NUMBER)
    return engine[spans.track[rows]] << 16 | number
