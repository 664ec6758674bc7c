"""A file that says how many spans there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tracekern.export.format import ExportStats, Format
from tracekern.timeline.model import Timeline


def write(timeline: Timeline, path: Path, *, tracks: str, progress: Callable[..., None] | None) -> ExportStats:
    written = Path(path).write_text(f"{len(timeline.spans)} spans by {tracks}")
    return ExportStats(len(timeline.spans), 0, written)


FORMAT = Format("toy", (".toy", ".toy.gz", ".toy.json"), write, for_browser=True)
