"""The drawings of a run that is read window by window, and where its spans are in the whole."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tracekern.export.drawing import Drawing, prepare
from tracekern.timeline.facts.iterations import Iterations, find_iterations
from tracekern.timeline.facts.last_times import TracksHeard
from tracekern.timeline.join.damage import TrackTimes
from tracekern.timeline.model import Int32, Int64, Timeline
from tracekern.timeline.select import Window, select
from tracekern.timeline.windowed import WindowedRun

Drawings = Sequence[Drawing]
"""Parts of a run that no flow leads out of, in the order of time. Their tables are those of the whole."""


def _last_heard(parts: Iterator[Timeline]) -> Int64:
    """[num_tracks] last times of a run by its parts, of which there is one at least."""
    first = next(parts)
    tables, heard = first.without_rows(), TracksHeard.of(first)
    del first
    return functools.reduce(operator.add, map(TracksHeard.of, parts), heard).by_clock(tables)


class Windows:
    """A run on disk, or what of it reaches into a window of time. Its first part is what belongs to no launch."""

    def __init__(self, run: WindowedRun, window: Window | None = None) -> None:
        self._run, self._window = run, window
        self._heard = _last_heard(map(run.part, range(len(self))))

    @property
    def tables(self) -> Timeline:
        return self._run.skeleton.without_rows()

    def __len__(self) -> int:
        return 1 + len(self._run.windows)

    @cached_property
    def iterations(self) -> Iterations:
        """Of all parts."""
        return find_iterations(select(self._run.skeleton, self._window, last_heard=self._heard))

    def part(self, number: int) -> Timeline:
        return select(self._run.part(number), self._window, last_heard=self._heard)

    @property
    def is_empty(self) -> bool:
        """Whether it has neither spans nor marks."""
        return not any(len(part.spans) or len(part.marks) for part in self.parts())

    @property
    def times(self) -> tuple[int, int]:
        """The first and the last time on record, in the window of time or not; (0, 0) without any."""
        whole = functools.reduce(operator.add, map(TrackTimes.of, map(self._run.part, range(len(self)))))
        first, last = int(whole.first.min()), int(whole.last.max())
        return (first, max(0, last)) if first <= last else (0, 0)

    def parts(self) -> Iterator[Timeline]:
        """Yields each part, of which none is kept while the next one is read."""
        return map(self.part, range(len(self)))

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
        self._last_heard = _last_heard(map(part, range(count))) if last_heard is None else last_heard

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

    @property
    def num_spans(self) -> int:
        return int(self.spans.sum())

    @classmethod
    def of(cls, timeline: Timeline) -> RowsOfTracks:
        spans = np.bincount(timeline.spans.track, minlength=len(timeline.tracks))
        return cls(spans, len(timeline.marks), len(timeline.flows))

    def __add__(self, other: RowsOfTracks) -> RowsOfTracks:
        return RowsOfTracks(
            self.spans + other.spans, self.num_marks + other.num_marks, self.num_flows + other.num_flows
        )

    @classmethod
    def total(cls, parts: Iterable[Timeline]) -> RowsOfTracks:
        return functools.reduce(operator.add, map(cls.of, parts))


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
