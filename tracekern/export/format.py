"""What save() must know of a format, and what its writer takes and returns."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from tracekern.export.windows import Windows
from tracekern.timeline.model import Timeline

TrackDetail = Literal["warp", "block"]
Progress = Callable[[int, int], None]
"""Takes the number of spans written and their total."""


@dataclass(frozen=True)
class ExportStats:
    """What went into the file, and what could not."""

    spans: int
    flows: int
    bytes: int
    marks: int = 0
    spans_left_out: int = 0
    """Spans of warps that `tracks="block"` does not show, and those outside a first view."""
    flows_left_out: int = 0
    """Flows that would point backwards in time, or whose spans were left out."""
    part: str = ""
    """What a first view shows, in words; "" where the file has all."""


class Write(Protocol):
    """Writes a timeline to a file that appears when it is whole. `tracks="block"`: one row per block and role."""

    def __call__(
        self,
        timeline: Timeline,
        path: str | os.PathLike[str],
        *,
        tracks: TrackDetail,
        progress: Progress | None,
    ) -> ExportStats: ...


class WriteWindows(Protocol):
    """Does so with a run of which one window is in memory at a time."""

    def __call__(
        self, windows: Windows, path: str | os.PathLike[str], *, tracks: TrackDetail, progress: Progress | None
    ) -> ExportStats: ...


@dataclass(frozen=True)
class Format:
    """One kind of file. Each module in tracekern/export/formats has one, as FORMAT."""

    name: str
    """What `format=` of save() is called with."""
    suffixes: tuple[str, ...]
    """Suffixes of file names. If those of two formats fit, the longest decides."""
    write: Write
    write_windows: WriteWindows | None = None
    """None: all of a run has to be in memory."""
    ns_a_span: int = 3_500
    """CPU time that windows take, for what is told before they start."""
    for_browser: bool = False
    """A browser shows it whole, so that save() warns where it has more spans than one bears."""
    order: int = 100
    """Place wherever formats are listed, the lowest first; of equal ones by name."""
