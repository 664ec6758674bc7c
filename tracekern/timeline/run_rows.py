"""The spans and marks of a run whose ranks are spooled: those of some launches, of all ranks, as load() has them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.timeline.clocks.axis import to_ns
from tracekern.timeline.join.calls import CallKeys
from tracekern.timeline.join.concatenate import Filling, Place
from tracekern.timeline.join.members import name_ranks_of
from tracekern.timeline.model import Channel, ChannelKind, Int64, Marks, Mask, Spans, Timeline
from tracekern.timeline.spool import RankSpool, channels_of_rows


@dataclass(frozen=True)
class RunRows:
    """The rows of all ranks: on disk those of kernels, in memory those of lanes."""

    lanes: Timeline
    """All tables, in ns, with the spans and marks that are in memory."""
    spools: list[RankSpool]
    places: list[Place]
    rank_bits: int
    """bits_of_ranks()"""

    @property
    def num_spans(self) -> Int64:
        """[num_launches] of each, its lane among them."""
        count = len(self.lanes.launches)
        found = np.bincount(self.lanes.spans.launch + 1, minlength=count + 1)[1:]
        for spool, place in zip(self.spools, self.places, strict=True):
            found[place.first_launch : place.first_launch + len(spool.num_spans)] += spool.num_spans
        return found

    @property
    def channels(self) -> dict[str, frozenset[Channel]]:
        """Name of each kernel -> channels, see channels_of_kernels()."""
        found: dict[str, frozenset[Channel]] = {}
        for spool in self.spools:
            for name, channels in spool.channels.items():
                found[name] = found.get(name, frozenset()) | channels
        return found

    @property
    def calls(self) -> dict[Channel, CallKeys]:
        """What tells calls apart on the channels of kernels."""
        found: dict[Channel, CallKeys] = {}
        for spool in self.spools:
            for channel, keys in spool.calls.items():
                found[channel] = found[channel] + keys if channel in found else keys
        return found

    def why_whole(self) -> str:
        """Why flows cannot be joined window by window; "" where they can."""
        of_kernels = frozenset[Channel]().union(*(spool.joined_on for spool in self.spools))
        counted = {channel for channel in of_kernels if channel.kind is ChannelKind.IMMEDIATE}
        shared = sorted({channel.name for channel in of_kernels & channels_of_rows(self.lanes) | counted})
        return f"kernels share channels with transfer engines: {', '.join(shared)}" if shared else ""

    def window(self, launches: Mask) -> Timeline:
        """The spans and marks of these launches, with all tables. launches: [num_launches]."""
        of_lanes = np.append(launches, False)[self.lanes.spans.launch]
        return self._take(launches, of_lanes, np.zeros(len(self.lanes.marks), bool))

    def whole(self) -> Timeline:
        """All spans and marks."""
        lanes = self.lanes
        return self._take(*(np.ones(len(rows), bool) for rows in (lanes.launches, lanes.spans, lanes.marks)))

    def _take(self, launches: Mask, spans_of_lanes: Mask, marks_of_lanes: Mask) -> Timeline:
        lanes = self.lanes
        num_marks = sum(int(np.diff(spool.marks.first)[own].sum()) for spool, own in self._by_rank(launches))
        spans = Filling(
            Spans(), int(self.num_spans[launches].sum() + (spans_of_lanes & (lanes.spans.launch < 0)).sum())
        )
        marks = Filling(Marks(), int(num_marks + marks_of_lanes.sum()))
        tracks = [*(place.first_track for place in self.places), len(lanes.tracks)]
        span_bounds, mark_bounds = (np.searchsorted(rows.track, tracks).tolist() for rows in (lanes.spans, lanes.marks))
        for number, (spool, own) in enumerate(self._by_rank(launches)):
            if own.any():
                piece = self._on_axis(number, spool.part(own))
                spans.add(self.places[number].spans(piece))
                marks.add(self.places[number].marks(piece))
            rows = slice(*span_bounds[number : number + 2])
            spans.add(vars(lanes.spans.take(rows).take(spans_of_lanes[rows])))
            rows = slice(*mark_bounds[number : number + 2])
            marks.add(vars(lanes.marks.take(rows).take(marks_of_lanes[rows])))
        return lanes.replace(spans=Spans(**spans.columns), marks=Marks(**marks.columns))

    def _by_rank(self, launches: Mask) -> list[tuple[RankSpool, Mask]]:
        """The spool of each rank, and which of its launches are among these."""
        own = np.split(launches, [place.first_launch for place in self.places[1:]])
        return list(zip(self.spools, own, strict=True))

    def _on_axis(self, number: int, piece: Timeline) -> Timeline:
        clock = self.lanes.ranks[number].clock
        assert clock is not None
        return to_ns(name_ranks_of(piece, self.rank_bits), clock, self.lanes.aligned)
