"""One call for all formats: the suffix of the file says which."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

from tracekern.errors import BadInput
from tracekern.export.chrome import write_chrome
from tracekern.export.otf2 import write_otf2
from tracekern.export.parquet import write_parquet
from tracekern.export.perfetto import ExportStats, write_perfetto
from tracekern.timeline.model import Timeline
from tracekern.timeline.select import select

FORMATS = {
    ".pftrace": "perfetto",
    ".pftrace.gz": "perfetto",
    ".json": "chrome",
    ".json.gz": "chrome",
    ".parquet": "parquet",
    ".otf2": "otf2",
}
MANY_SPANS = 5_000_000
"""More than this makes a browser slow or ends its memory."""


class ManySpansWarning(UserWarning):
    """The trace is larger than a browser can show with ease."""


def format_of(path: str | os.PathLike[str]) -> str:
    """ "perfetto", "chrome", "parquet" or "otf2", by the suffix. Raises BadInput for any other."""
    name = os.fspath(path)
    for suffix, format_name in FORMATS.items():
        if name.endswith(suffix):
            return format_name
    raise BadInput(f"{name}: the suffix picks the format and must be one of {', '.join(FORMATS)}")


def export(
    timeline: Timeline,
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002
    *,
    tracks: Literal["warp", "block"] = "warp",
    window: tuple[int, int] | None = None,
    ranks: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExportStats:
    """Writes `timeline`, or the part of it in `window` (ns from its origin) and on `ranks`, to `path`.

    `format` ("perfetto", "chrome", "parquet", "otf2": a new directory) overrides the suffix. `tracks="block"` shows one
    row per block and role; Parquet always holds every span. Warns with ManySpansWarning above 5 million spans.

    Raises:
        BadInput: unknown suffix or format, a rank that is not there, an empty window, a file that cannot be written.
    """
    format_name = format or format_of(path)
    if format_name not in FORMATS.values():
        raise BadInput(f"format {format_name!r} is unknown; choose perfetto, chrome, parquet or otf2")
    if tracks not in ("warp", "block"):
        raise BadInput(f"track detail {tracks!r} is unknown; choose warp or block")
    timeline = select(timeline, window, ranks)
    if format_name == "parquet":
        return write_parquet(timeline, path, progress=progress)
    writers = {"perfetto": write_perfetto, "chrome": write_chrome, "otf2": write_otf2}
    stats = writers[format_name](timeline, path, tracks=tracks, progress=progress)
    if stats.spans > MANY_SPANS:
        warnings.warn(
            f"{os.fspath(path)} has {stats.spans:,} spans, a browser is slow above {MANY_SPANS:,}; "
            "choose a part with --window, --ranks or --tracks block",
            ManySpansWarning,
            stacklevel=2,
        )
    return stats
