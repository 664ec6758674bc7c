"""One call for all formats: the suffix of the file says which."""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings
from collections.abc import Sequence
from functools import cache

import tracekern.export.formats as package
from tracekern.errors import BadInput
from tracekern.export.format import ExportStats, Format, Progress, TrackDetail
from tracekern.export.windows import Windows
from tracekern.timeline.model import Timeline
from tracekern.timeline.select import select

MANY_SPANS = 5_000_000
"""More than this makes a browser slow or ends its memory."""


class ManySpansWarning(UserWarning):
    """The trace is larger than a browser can show with ease."""


@cache
def formats() -> tuple[Format, ...]:
    """Every format that has a file in tracekern/export/formats, in the order of lists."""
    modules = (
        importlib.import_module(f"{package.__name__}.{file.name}") for file in pkgutil.iter_modules(package.__path__)
    )
    return tuple(sorted((module.FORMAT for module in modules), key=lambda entry: (entry.order, entry.name)))


def format_of(path: str | os.PathLike[str]) -> Format:
    """The format that the suffix of `path` picks. Raises BadInput where it picks none."""
    name = os.fspath(path)
    by_suffix = {suffix: entry for entry in formats() for suffix in entry.suffixes}
    fitting = [suffix for suffix in by_suffix if name.endswith(suffix)]
    if not fitting:
        raise BadInput(f"{name}: the suffix picks the format and must be one of {', '.join(by_suffix)}")
    return by_suffix[max(fitting, key=len)]


def save(
    timeline: Timeline,
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002
    *,
    tracks: TrackDetail = "warp",
    window: tuple[int, int] | None = None,
    ranks: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> ExportStats:
    """Writes a timeline, or a part of it, to a file. The file appears when it is complete.

    Warns with ManySpansWarning where a trace has more than 5 million spans, which makes a browser slow.

    Args:
        timeline: What `load()` returned.
        path: The file. Its suffix picks the format: .pftrace, .json, both also with .gz, or .parquet.
        format: "perfetto", "chrome" or "parquet", whatever the suffix.
        tracks: "block" draws one row for each block and role, that of its first warp. Parquet has every span.
        window: Begin and end of the part to write, in ns from the timeline's origin.
        ranks: The ranks to write.
        progress: Called with the number of spans written and their total.

    Returns:
        What the file holds, and what was left out.

    Raises:
        BadInput: The suffix, format, rank or window cannot be used, or the file cannot be written.
    """
    chosen = _format_named(format) if format else format_of(path)
    if tracks not in ("warp", "block"):
        raise BadInput(f"track detail {tracks!r} is unknown; choose warp or block")
    timeline = select(timeline, window, ranks)
    stats = chosen.write(timeline, path, tracks=tracks, progress=progress)
    if chosen.for_browser:
        _warn_if_large(path, stats)
    return stats


def save_windows(
    windows: Windows,
    path: str | os.PathLike[str],
    *,
    tracks: TrackDetail = "warp",
    progress: Progress | None = None,
) -> ExportStats:
    """Writes a run that does not fit into memory: what save() writes of all of it. Warns and raises as save() does.

    The suffix of `path` has to be of a format that can be written so.
    """
    chosen = format_of(path)
    assert chosen.write_windows is not None
    stats = chosen.write_windows(windows, path, tracks=tracks, progress=progress)
    if chosen.for_browser:
        _warn_if_large(path, stats)
    return stats


def save_in_capture(
    timeline: Timeline, path: str | os.PathLike[str], *, progress: Progress | None = None
) -> ExportStats:
    """Writes the trace of a capture, for Perfetto, into its directory. Warns and raises as save() does.

    A link of that name is replaced: the user named only the directory.
    """
    from tracekern.export.formats.perfetto import write_perfetto

    stats = write_perfetto(timeline, path, progress=progress, through_link=False)
    _warn_if_large(path, stats)
    return stats


def _warn_if_large(path: str | os.PathLike[str], stats: ExportStats) -> None:
    if stats.spans > MANY_SPANS:
        warnings.warn(
            f"{os.fspath(path)} has {stats.spans:,} spans, a browser is slow above {MANY_SPANS:,}; "
            "choose a part with --window, --ranks or --tracks block",
            ManySpansWarning,
            stacklevel=3,
        )


def _format_named(name: str) -> Format:
    by_name = {entry.name: entry for entry in formats()}
    if name not in by_name:
        *others, last = by_name
        raise BadInput(f"format {name!r} is unknown; choose {', '.join(others)} or {last}")
    return by_name[name]
