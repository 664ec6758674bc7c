"""`tracekern merge` and `tracekern export`: read captures, choose a part, write one file, print what is in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekern.cli import options
from tracekern.cli.options import (
    Tracks,
    check_files,
    check_window,
    nothing_recorded,
    parse_host,
    parse_memory,
    parse_ranks,
    parse_window,
)
from tracekern.cli.output import console, note, print_json, progress, show_it, suggest, warnings_as_notes, working
from tracekern.errors import BadInput
from tracekern.formatting import count

if TYPE_CHECKING:
    from tracekern.analysis.in_windows import Cost
    from tracekern.export.format import ExportStats
    from tracekern.timeline.model import Timeline


@dataclass(frozen=True)
class Source:
    """Captures and the part of them to convert, as typed."""

    captures: list[Path]
    unaligned: bool
    strict: bool
    partial: bool
    window: str | None
    ranks: str | None
    tracks: Tracks
    host: list[str] | None
    memory: str | None


def merge(
    captures: Annotated[list[Path], typer.Argument(metavar="CAPTURE", help="Capture directories, or single dumps.")],
    output: options.Output,
    unaligned: options.Unaligned = False,
    strict: options.Strict = False,
    partial: options.Partial = False,
    window: options.Window = None,
    ranks: options.Ranks = None,
    tracks: options.TrackDetail = options.Tracks.warp,
    host: options.Host = None,
    memory: options.Memory = None,
    as_json: options.Json = False,
) -> None:
    """Put the captures of all ranks on one time axis and write one trace."""
    _convert(Source(captures, unaligned, strict, partial, window, ranks, tracks, host, memory), output, as_json)


def export(
    capture: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A capture directory.")],
    output: options.Output,
    unaligned: options.Unaligned = False,
    strict: options.Strict = False,
    partial: options.Partial = False,
    window: options.Window = None,
    ranks: options.Ranks = None,
    tracks: options.TrackDetail = options.Tracks.warp,
    host: options.Host = None,
    memory: options.Memory = None,
    as_json: options.Json = False,
) -> None:
    """Write one capture in the format that the suffix of the output picks."""
    _convert(Source([capture], unaligned, strict, partial, window, ranks, tracks, host, memory), output, as_json)


def _convert(source: Source, output: Path, as_json: bool) -> None:
    """Reads the captures and writes `output` in the format of its suffix; prints what it holds."""
    from tracekern.analysis.in_windows import Cost
    from tracekern.export.write import format_of

    chosen = format_of(output)
    window, ranks = parse_window(source.window), parse_ranks(source.ranks)
    how = {
        "unaligned": source.unaligned,
        "strict": source.strict,
        "partial": source.partial,
        "host": [parse_host(text) for text in source.host or []],
    }
    memory = parse_memory(source.memory)
    if output.is_dir():
        raise BadInput(f"{output}: is a directory; wanted the name of a file, as in {output / 'trace.pftrace.gz'}")
    check_files(output)
    cost = replace(Cost.of(source.captures, memory), num_processes=1, disk_a_span=40, ns_a_span=chosen.ns_a_span)
    if cost.fits:
        if memory is not None:
            note(f"in memory: {cost.in_memory()}")
        timeline, stats = _in_memory(source, output, window, ranks, how)
    else:
        if ranks is not None:
            raise BadInput(
                f"--ranks: {cost.in_windows()}, and windows are of all ranks; name their dumps with --partial"
            )
        if chosen.write_windows is None:
            raise BadInput(f"{output}: {cost.in_memory()}, and this format has no windows; choose another suffix")
        timeline, stats = _in_windows(source, output, window, cost, how) or _in_memory(
            source, output, window, ranks, how
        )
    result = {"file": str(output), "format": chosen.name, **vars(stats), "aligned": timeline.aligned}
    if as_json:
        print_json({**result, "problems": _problems(timeline)})
    else:
        _print(result, timeline)


def _in_memory(
    source: Source, output: Path, window: tuple[int, int] | None, ranks: list[int] | None, how: dict[str, Any]
) -> tuple[Timeline, ExportStats]:
    """Returns the tables, with whatever rows, and what was written. how: to load it."""
    from tracekern.export.write import save
    from tracekern.timeline.load import load
    from tracekern.timeline.select import select

    with working("reading and aligning the captures"):
        timeline = load(source.captures, **how)
        check_window(select(timeline, ranks=ranks), window)
    with warnings_as_notes(), progress(f"writing {output.name}") as tell:
        stats = save(timeline, output, tracks=source.tracks.value, window=window, ranks=ranks, progress=tell)
    return timeline, stats


def _in_windows(
    source: Source, output: Path, window: tuple[int, int] | None, cost: Cost, how: dict[str, Any]
) -> tuple[Timeline, ExportStats] | None:
    """Does so with one window in memory at a time. Returns None where that cannot be."""
    from tracekern.export.windows import Windows
    from tracekern.export.write import format_of, save_windows
    from tracekern.files import scratch_directory
    from tracekern.timeline.join.puts import has_puts
    from tracekern.timeline.windowed import load_windows

    note(f"in windows: {cost.in_windows()}")
    with warnings_as_notes(), scratch_directory() as scratch, progress("reading ranks") as tell:
        run = load_windows(source.captures, scratch, cost.spans_of_window, tell=tell, **how)
        if format_of(output).for_browser and has_puts(run.skeleton):
            note(f"all at once: arrows lead through proxies out of every window; {cost.in_memory()}")
            return None
        if run.why_whole:
            note(f"all launches are one window: {run.why_whole}; {cost.in_memory()}")

        windows = Windows(run, window)
        if window is not None and windows.is_empty and (times := windows.times) != (0, 0):
            raise nothing_recorded(window, times)

        def tell_spans(done: int, total: int) -> None:
            tell(done, total, f"writing {output.name}")

        stats = save_windows(windows, output, tracks=source.tracks.value, progress=tell_spans)
    return run.skeleton, stats


def _problems(timeline: Any) -> list[dict[str, Any]]:
    return [vars(problem) for problem in timeline.problems]


def _print(result: dict[str, Any], timeline: Any) -> None:
    from tracekern.timeline.model import told_once

    out = console()
    size = f"{result['bytes'] / 1e6:.1f} MB" if result["bytes"] >= 1e5 else f"{result['bytes']:,} bytes"
    counts = f"{count(result['spans'], 'span')}, {count(result['flows'], 'arrow')}"
    step = f"   {show_it(Path(result['file']))}" if result["format"] == "perfetto" else ""
    out.print(f"{result['file']}: {counts}, {size}{step}", soft_wrap=True)
    spans, arrows = count(result["spans_left_out"], "span"), count(result["flows_left_out"], "arrow")
    if result["spans_left_out"]:
        out.print(f"left out: {spans}, {arrows}")
    elif result["flows_left_out"]:
        out.print(f"left out: {arrows} that would point backwards in time")
    problems = told_once(timeline.problems)
    for problem in problems[:10]:
        note(f"{problem.severity}: {problem.text}")
    if len(problems) > 10:
        note(f"and {len(problems) - 10} more; {suggest('info')} counts them by kind")
