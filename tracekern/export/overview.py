"""What a picture says of a whole run before it shows its parts: how long it is, what there is, where to look first."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracekern.export.counters import CountersOnDisk
from tracekern.export.drawing import Drawing, in_one_row_per_block
from tracekern.export.first_waits import FirstWaits, LongestWaits
from tracekern.export.format import ExportStats, TrackDetail
from tracekern.export.windows import Drawings, RowsOfTracks, Windows
from tracekern.files import scratch_directory
from tracekern.timeline.facts.counters import Counter
from tracekern.timeline.facts.iterations import Iterations, find_iterations
from tracekern.timeline.model import Int64, Mask, Problem, Timeline

_LATE, _EARLY = np.iinfo(np.int64).max, np.iinfo(np.int64).min


@dataclass(frozen=True)
class Overview:
    """Adds up over the parts of a run."""

    tables: Timeline
    """Those of the run."""
    iterations: Iterations
    """Of the run."""
    first_ns: int
    last_ns: int
    """Later than `first_ns` where anything is drawn."""
    is_used: Mask
    """[num_tracks] whether there is a span or mark on it."""
    last_end: Int64
    """[num_tracks] when the last span on it ends in the picture."""
    num_spans: int
    num_marks: int
    num_flows: int
    num_drawable: int
    num_drawn: int
    longest: LongestWaits
    part: str

    @classmethod
    def of(cls, drawing: Drawing, iterations: Iterations) -> Overview:
        timeline = drawing.timeline
        num_tracks, has_rows = len(timeline.tracks), bool(len(timeline.spans) or len(timeline.marks))
        is_used, last_end = np.zeros(num_tracks, bool), np.full(num_tracks, _EARLY)
        is_used[timeline.spans.track] = True
        is_used[timeline.marks.track] = True
        np.maximum.at(last_end, timeline.spans.track, drawing.draw_end)
        return cls(
            tables=timeline.without_rows(),
            iterations=iterations,
            first_ns=drawing.first_ns if has_rows else _LATE,
            last_ns=drawing.last_ns if has_rows else _EARLY,
            is_used=is_used,
            last_end=last_end,
            num_spans=len(timeline.spans),
            num_marks=len(timeline.marks),
            num_flows=len(timeline.flows),
            num_drawable=int(drawing.flow_drawable.sum()),
            num_drawn=int(drawing.flow_drawn.sum()),
            longest=LongestWaits.of(drawing, iterations),
            part=drawing.part,
        )

    @classmethod
    def total(cls, drawings: Drawings, iterations: Iterations | None = None) -> Overview:
        """iterations: of the run; without, `drawings` is one of all of it."""
        iterations = find_iterations(drawings[0].timeline) if iterations is None else iterations
        parts = (cls.of(drawings[number], iterations) for number in range(len(drawings)))
        found = functools.reduce(operator.add, parts)
        return found if found.last_ns >= found.first_ns else replace(found, first_ns=0, last_ns=0)

    def __add__(self, other: Overview) -> Overview:
        return Overview(
            tables=self.tables,
            iterations=self.iterations,
            first_ns=min(self.first_ns, other.first_ns),
            last_ns=max(self.last_ns, other.last_ns),
            is_used=self.is_used | other.is_used,
            last_end=np.maximum(self.last_end, other.last_end),
            num_spans=self.num_spans + other.num_spans,
            num_marks=self.num_marks + other.num_marks,
            num_flows=self.num_flows + other.num_flows,
            num_drawable=self.num_drawable + other.num_drawable,
            num_drawn=self.num_drawn + other.num_drawn,
            longest=self.longest + other.longest,
            part=self.part,
        )

    @property
    def time_shift(self) -> int:
        """What is added to all times: a picture's are not below 0."""
        return max(0, -self.first_ns)

    @property
    def first_waits(self) -> FirstWaits:
        return FirstWaits.of(self.longest, self.iterations)

    def stats(self, path: str | os.PathLike[str], num_spans: int, num_flows: int) -> ExportStats:
        """What the file holds. num_spans, num_flows: what could have been drawn."""
        return ExportStats(
            spans=self.num_spans,
            flows=self.num_drawn,
            bytes=os.path.getsize(path),
            marks=self.num_marks,
            spans_left_out=num_spans - self.num_spans,
            flows_left_out=num_flows - self.num_drawn,
            part=self.part,
        )

    def problem_times(self) -> list[tuple[Problem, int]]:
        """Each problem with the time to draw it at: the end of its track, where a loss began, or the start of all.

        There a nanosecond apart: instants of one time are drawn below each other, and would make their row a tower.
        """
        at_start = itertools.count(self.first_ns)
        last_end = np.maximum(self.last_end, self.first_ns)
        return [
            (problem, int(last_end[problem.track]) if problem.track >= 0 else next(at_start))
            for problem in self.tables.problems
        ]


@contextlib.contextmanager
def to_draw(
    windows: Windows, tracks: TrackDetail
) -> Iterator[tuple[Drawings, Overview, Sequence[Counter], RowsOfTracks]]:
    """Yields what a picture of a run takes that is not in memory, and the rows of it, drawn or not."""
    rows, change = RowsOfTracks.total(windows.parts()), None
    if tracks == "block":
        change = in_one_row_per_block(windows.tables, rows.spans)
    with scratch_directory() as folder:
        drawings = windows.drawings(change)
        yield drawings, Overview.total(drawings, windows.iterations), CountersOnDisk(windows, folder), rows
