"""`tracekern diff`: two captures side by side, as a table and as one Perfetto trace aligned at a launch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekern.cli import options
from tracekern.cli.output import BROWSER_SUFFIXES, console, note, print_json, progress, show_it, table, working
from tracekern.errors import BadInput
from tracekern.formatting import duration, growth, whole_number

if TYPE_CHECKING:
    from tracekern.analysis.statistics import PhaseStatistics, RunStatistics
    from tracekern.timeline.model import Timeline


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A capture directory.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The capture to compare with it.")],
    output: Annotated[
        Path | None, options.output_option("FILE", f"One page, .html, or one trace of both: {BROWSER_SUFFIXES}.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="LAUNCH#N", help="Start the trace's sides together there; as in dispatch_send#2."),
    ] = None,
    unaligned: options.Unaligned = False,
    partial: options.Partial = False,
    as_json: options.Json = False,
) -> None:
    """Show two captures side by side: phases, waits, time of an iteration. For proof, use tracekern ab."""
    from tracekern.analysis.difference import CAVEAT, differences
    from tracekern.analysis.statistics import phase_statistics
    from tracekern.timeline.load import load

    where = _parse_at(at)
    if output:
        _check_output(output)
    if where and (output is None or output.suffix == ".html"):
        raise BadInput("--at places the two sides of a trace; name the trace, as in -o both.pftrace.gz")
    with working("reading and aligning the captures"):
        timelines = [load(path, unaligned=unaligned, partial=partial) for path in (first, second)]
        _refuse_damaged((first, second), timelines)
        sides = [phase_statistics(timeline) for timeline in timelines]
    warnings = _warnings(timelines, sides)
    if output and output.suffix == ".html":
        _write_page((first, second), timelines, sides, warnings, output)
    elif output:
        _write(timelines, where, output)
    if as_json:
        rows = [
            {"metric": d.metric, "a": _plain(d.first), "b": _plain(d.second), "change": _plain(d.change)}
            for d in differences(*sides)
        ]
        print_json({"a": str(first), "b": str(second), "differences": rows, "warnings": warnings, "caveat": CAVEAT})
        return
    for warning in warnings:
        note(warning)
    out = console()
    out.print(f"A: {first}", soft_wrap=True)
    out.print(f"B: {second}", soft_wrap=True)
    out.print(_phase_table(*sides))
    out.print(_end_to_end(*sides))
    out.print(CAVEAT)
    if output:
        note(f"{output}: open it in a browser" if output.suffix == ".html" else _next_step(output))


def _next_step(output: Path) -> str:
    from tracekern.export.write import format_of

    step = f"   {show_it(output)}" if format_of(output).name == "perfetto" else ""
    return f"both in one trace: {output}{step}"


def _parse_at(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    name, _, digits = text.rpartition("#")
    number = whole_number(digits)
    if not name or number is None:
        raise BadInput(f"--at: got {text!r}, wanted LAUNCH#N, as in dispatch_send#2")
    return name, number


def _check_output(output: Path) -> None:
    from tracekern.export.write import format_of

    try:
        if output.suffix != ".html":
            format_of(output)
    except BadInput as error:
        raise BadInput(f"{error}, or .html for a page") from None
    options.check_files(output)


def _write(timelines: list[Timeline], at: tuple[str, int] | None, output: Path) -> None:
    from tracekern.export.write import save
    from tracekern.timeline.join.side_by_side import side_by_side

    both = side_by_side(timelines[0], timelines[1], at=at)
    with progress(f"writing {output.name}") as tell:
        save(both, output, progress=tell)


def _write_page(
    names: tuple[Path, Path],
    timelines: list[Timeline],
    sides: list[RunStatistics],
    warnings: list[str],
    output: Path,
) -> None:
    from tracekern.analysis.difference import CAVEAT, differences
    from tracekern.analysis.findings import analyze
    from tracekern.files import write_whole
    from tracekern.viewers.diff_page import Side, diff_page

    first, second = (
        Side(str(name), analyze(timeline), statistics)
        for name, timeline, statistics in zip(names, timelines, sides, strict=True)
    )
    write_whole(output, diff_page((first, second), differences(*sides), warnings, CAVEAT))


def _refuse_damaged(paths: tuple[Path, Path], timelines: list[Timeline]) -> None:
    from tracekern.timeline.join.damage import damage_of

    for path, timeline in zip(paths, timelines, strict=True):
        if damage := damage_of(timeline):
            raise BadInput(f"{path}: {damage}")


def _warnings(timelines: list[Timeline], sides: list[RunStatistics]) -> list[str]:
    """Returns what makes the two captures less comparable than they look."""
    from tracekern.gate.run import difference, make_run

    runs = [
        make_run(name, statistics, timeline, timeline.ranks[0].metadata)
        for name, statistics, timeline in zip("AB", sides, timelines, strict=True)
    ]
    warnings = [f"{run.source} proves nothing: {run.losses[0]}" for run in runs if run.losses]
    if text := difference(*reversed(runs)):
        warnings.append(f"different shapes: {text}")
    if (runs[0].device, runs[0].nodes) != (runs[1].device, runs[1].nodes):
        places = " and ".join(f"{run.device} on {', '.join(run.nodes)}" for run in runs)
        warnings.append(f"different places: {places}")
    return warnings


def _phase_table(first: RunStatistics, second: RunStatistics) -> object:
    grid = table(
        ["A p50", "B p50", "change", "A p99", "B p99", "change", "A waits", "B waits", "A spans", "B spans"], ["phase"]
    )
    ours, theirs = ({phase.name: phase for phase in side.phases} for side in (first, second))
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name), theirs.get(name)
        grid.add_row(
            *_pair(a, b, "p50_ns"),
            *_pair(a, b, "p99_ns"),
            *(_share(phase.wait_share) if phase else "" for phase in (a, b)),
            *(f"{phase.num_spans:,}" if phase else "-" for phase in (a, b)),
            name,
        )
    return grid


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f} %"


def _pair(a: PhaseStatistics | None, b: PhaseStatistics | None, field: str) -> list[str]:
    before, after = (getattr(phase, field) if phase else None for phase in (a, b))
    cells = ["-" if value is None else duration(value) for value in (before, after)]
    return [*cells, growth(after / before - 1) if before and after is not None else "-"]


def _end_to_end(first: RunStatistics, second: RunStatistics) -> str:
    before, after = (side.metrics().get("end_to_end.p50") for side in (first, second))
    cells = ["unknown" if value is None else duration(value) for value in (before, after)]
    change = f" ({growth(after / before - 1)})" if before and after else ""
    counts = f"{first.num_measured} and {second.num_measured} measured"
    set_up = sorted({*first.set_up_stages, *second.set_up_stages})
    left_out = f"; set-up, not measured: {', '.join(set_up)}" if set_up else ""
    return f"an iteration takes {cells[0]} in A, {cells[1]} in B{change}; median of {counts}{left_out}"


def _plain(value: float) -> Any:
    return value if math.isfinite(value) else None
