"""The rows of one rank on disk, by launch, so that those of some launches can be read without the others.

A rank's dump always fits into memory: the rank recorded it there. What its kernels' warps recorded is put aside; what
there is of lanes, of streams, engines and later of hosts, is little and stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracekern.timeline.clocks.axis import Times, first_and_last
from tracekern.timeline.columns import order_of
from tracekern.timeline.join.calls import CallKeys
from tracekern.timeline.join.flows import calls_of
from tracekern.timeline.model import Channel, Int64, Marks, Mask, Spans, Timeline, TrackKind
from tracekern.timeline.row_files import RowFile
from tracekern.timeline.windows import channels_of_kernels


@dataclass(frozen=True)
class _RowsByLaunch:
    """Spans or marks, by launch and in each as they were."""

    file: RowFile
    first: Int64
    """[num_launches + 1] the first row of each launch in the file."""

    @classmethod
    def write(cls, path: Path, rows: Spans | Marks, num_launches: int) -> _RowsByLaunch:
        order = order_of(rows.launch)
        columns = {name: column[order] for name, column in _columns(rows).items()}
        file = RowFile.write(path, {"row": order.astype(np.int32), **columns})
        return cls(file, np.append(0, np.cumsum(np.bincount(rows.launch, minlength=num_launches))))

    def read(self, launches: Mask) -> dict[str, Any]:
        """[n] each column of the rows of these launches, in the order in which they were all together."""
        edges = np.flatnonzero(np.diff(launches, prepend=False, append=False)).reshape(-1, 2).tolist()
        if not edges:
            return self.file.read(0, 0) | {"launch": np.empty(0, np.int32)}
        parts = [self.file.read(*self.first[edge].tolist()) for edge in edges]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        number = np.flatnonzero(launches).astype(np.int32)
        columns["launch"] = np.repeat(number, np.diff(self.first)[number])
        order = order_of(columns.pop("row"))
        return {name: column[order] for name, column in columns.items()}


def _columns(rows: Spans | Marks) -> dict[str, Any]:
    """What is written: of spans the length in place of the end, which takes fewer bytes."""
    columns = {name: column for name, column in vars(rows).items() if name != "launch"}
    if isinstance(rows, Spans):
        columns["end"] = rows.end - rows.start
    return columns


@dataclass(frozen=True)
class RankSpool:
    """What warps of one rank recorded, and what has to be known of all of it at once."""

    tables: Timeline
    """The rank in ticks, as decoded, without spans and marks."""
    spans: _RowsByLaunch
    marks: _RowsByLaunch
    ticks: Times | None
    """first_and_last() of these spans and marks."""
    channels: dict[str, frozenset[Channel]]
    """channels_of_kernels()"""
    calls: dict[Channel, CallKeys]
    """Of the channels on which there are ends among these spans."""
    joined_on: frozenset[Channel]
    """All channels, of whatever kind, that these spans and marks are of."""
    has_open: bool
    """Whether some of these spans never ended."""

    @classmethod
    def write(cls, piece: Timeline, scratch: Path) -> tuple[RankSpool, Timeline]:
        """(the spool, the piece with the spans and marks that stay). piece: of one rank, as decoded.

        Raises BadInput where there is no room for its files.
        """
        kind = np.array([track.kind for track in piece.tracks], np.int64)
        num_tracks = int(np.argmax(np.append(kind != TrackKind.DEVICE, True)))  # tracks of lanes are behind
        cut = [int(np.searchsorted(rows.track, num_tracks)) for rows in (piece.spans, piece.marks)]
        own = piece.replace(spans=piece.spans.take(slice(cut[0])), marks=piece.marks.take(slice(cut[1])))
        rest = piece.replace(
            spans=_copied(piece.spans.take(slice(cut[0], None))), marks=_copied(piece.marks.take(slice(cut[1], None)))
        )
        name, num_launches = f"rank_{piece.ranks[0].rank:05d}", len(piece.launches)
        joined_on = channels_of_rows(own)
        spool = cls(
            piece.replace(spans=Spans(), marks=Marks()),
            _RowsByLaunch.write(scratch / f"{name}.spans", own.spans, num_launches),
            _RowsByLaunch.write(scratch / f"{name}.marks", own.marks, num_launches),
            first_and_last(own.spans, own.marks),
            channels_of_kernels(own),
            {channel: keys for channel, keys in calls_of(own).items() if channel in joined_on},
            joined_on,
            bool(own.spans.is_open.any()),
        )
        return spool, rest

    @property
    def num_spans(self) -> Int64:
        """[num_launches]"""
        return np.diff(self.spans.first)

    def part(self, launches: Mask) -> Timeline:
        """The rank in ticks with the spans and marks of these launches. launches: [num_launches] of this rank."""
        spans = self.spans.read(launches)
        spans["end"] += spans["start"]
        return self.tables.replace(spans=Spans(**spans), marks=Marks(**self.marks.read(launches)))


def channels_of_rows(timeline: Timeline) -> frozenset[Channel]:
    """The channels on which its spans and marks are joined to others."""
    rows = timeline.spans.event, timeline.marks.event
    events = sum(np.bincount(event, minlength=len(timeline.events)) for event in rows)
    found = [timeline.events[idx].channel for idx in np.flatnonzero(events).tolist()]
    return frozenset(channel for channel in found if channel and not channel.kind.is_local)


def _copied(rows: Any) -> Any:
    """The rows in memory of their own: a view would keep all of the columns."""
    return rows.take(np.arange(len(rows)))
