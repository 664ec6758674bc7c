"""The drawings of a run that is read window by window, and where its spans are in the whole."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.export.drawing import Drawing, prepare
from tracekern.timeline.facts.last_times import TracksHeard
from tracekern.timeline.model import Int32, Int64, Timeline
from tracekern.timeline.select import Window, select
from tracekern.timeline.windowed import WindowedRun

Drawings = Sequence[Drawing]
"""Parts of a run that no flow leads out of, in the order of time. Their tables are those of the whole."""


class Windows:
    """A run on disk, or what of it reaches into a window of time. Its first part is what belongs to no launch."""

    def __init__(self, run: WindowedRun, window: Window | None = None) -> None:
        self._run, self._window = run, window
        whole = (TracksHeard.of(run.part(number)) for number in range(len(self)))
        self._heard = functools.reduce(operator.add, whole).by_clock(run.skeleton)

    @property
    def tables(self) -> Timeline:
        return self._run.skeleton.without_rows()

    def __len__(self) -> int:
        return 1 + len(self._run.windows)

    def part(self, number: int) -> Timeline:
        return select(self._run.part(number), self._window, last_heard=self._heard)

    def drawings(self, change: Callable[[Timeline], Timeline] | None = None) -> Drawings:
        """change: what becomes of each part before it is drawn."""
        known = self._heard if self._window is None and change is None else None
        return _WindowDrawings(len(self), lambda number: (change or _same)(self.part(number)), known)


def _same(part: Timeline) -> Timeline:
    return part


class _WindowDrawings(Drawings):
    """One is in memory at a time."""

    def __init__(self, count: int, part: Callable[[int], Timeline], last_heard: Int64 | None) -> None:
        self._count, self._part = count, part
        self._latest: tuple[int, Drawing] | None = None
        if last_heard is None:
            heard = functools.reduce(operator.add, (TracksHeard.of(part(number)) for number in range(count)))
            last_heard = heard.by_clock(part(0))
        self._last_heard = last_heard

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if self._latest is None or self._latest[0] != number:
            self._latest = None  # so that it makes room
            self._latest = number, prepare(self._part(number), self._last_heard)
        return self._latest[1]


@dataclass(frozen=True)
class RowsOfTracks:
    """How many spans and marks of all parts there are. Adds up."""

    spans: Int64
    """[num_tracks]"""
    num_marks: int
    num_flows: int

    @classmethod
    def of(cls, drawing: Drawing) -> RowsOfTracks:
        timeline = drawing.timeline
        spans = np.bincount(timeline.spans.track, minlength=len(timeline.tracks))
        return cls(spans, len(timeline.marks), len(timeline.flows))

    def __add__(self, other: RowsOfTracks) -> RowsOfTracks:
        return RowsOfTracks(
            self.spans + other.spans, self.num_marks + other.num_marks, self.num_flows + other.num_flows
        )

    @classmethod
    def total(cls, drawings: Drawings) -> RowsOfTracks:
        return functools.reduce(operator.add, (cls.of(drawings[number]) for number in range(len(drawings))))


class SpanNumbers:
    """Numbers spans as one drawing of all parts has them: by track, and there as they come, part by part."""

    def __init__(self, spans: Int64) -> None:
        """spans: [num_tracks] how many there are."""
        self._next = np.cumsum(spans) - spans

    def take(self, track: Int32) -> Int64:
        """[n] the numbers of the next part's spans. track: [n] of each, ascending."""
        count = np.bincount(track, minlength=len(self._next))
        ahead = np.cumsum(count) - count
        number = (self._next - ahead)[track] + np.arange(len(track))
        self._next = self._next + count
        return number
