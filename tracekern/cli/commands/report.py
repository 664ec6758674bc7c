"""`tracekern report`: prints the most important lines, and writes the whole report as a page."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekern.cli import options
from tracekern.cli.commands.salvage import naming_the_rest
from tracekern.cli.output import console, note, print_json, progress, suggest, table, working
from tracekern.cli.stage_table import print_stages
from tracekern.errors import BadInput

if TYPE_CHECKING:
    from tracekern.analysis.findings import Findings
    from tracekern.analysis.why.answer import Answer, Cause, Cost, Incident
    from tracekern.analysis.why.chance import Pattern
    from tracekern.analysis.why.critical_path import PathPart
    from tracekern.timeline.model import Timeline
    from tracekern.viewers.report.headlines import Line


_Key = Annotated[
    str | None, typer.Option(metavar="KEY", help="Only the time from the first to the last launch with this key.")
]


def report(
    captures: Annotated[list[Path], typer.Argument(metavar="CAPTURE", help="Capture directories, or single dumps.")],
    output: Annotated[
        Path | None, options.output_option("FILE", "Write the whole report as one HTML file that needs no network.")
    ] = None,
    unaligned: options.Unaligned = False,
    strict: options.Strict = False,
    partial: options.Partial = False,
    window: options.Window = None,
    ranks: options.Ranks = None,
    key: _Key = None,
    link_limit: Annotated[
        float | None,
        typer.Option(metavar="GB/s", help="Measured limit of a link, to compare the links with."),
    ] = None,
    memory: options.Memory = None,
    every: options.Every = 1,
    as_json: options.Json = False,
) -> None:
    """Say what dominates, who waits for whom and why; write it as a page with -o report.html."""
    _check_page(output, link_limit)
    if key is not None and window is not None:
        raise BadInput("--key, --window: both choose a part of the time; give one of them")
    chosen_window, chosen_ranks = options.parse_window(window), options.parse_ranks(ranks)

    def choose_window(timeline: Timeline) -> tuple[int, int] | None:
        from tracekern.analysis.questions.launch_keys import window_of_key

        chosen = chosen_window if key is None else window_of_key(timeline, key)
        options.check_window(timeline, chosen, of_kernels=True)
        return chosen

    how = {"unaligned": unaligned, "strict": strict, "partial": partial, "every": every}
    limit = options.parse_memory(memory)
    with (
        naming_the_rest(captures),
        _findings_of(captures, limit, chosen_ranks, choose_window, link_limit, how) as found,
    ):
        _tell(found, captures, output, as_json)
    if as_json:
        return
    if output is None:
        options_given = ["--unaligned"] * unaligned + ["--partial"] * partial
        options_given += ["--every", str(every)] if every > 1 else []
        given = {"window": window, "key": key, "ranks": ranks, "link-limit": link_limit, "memory": memory}
        for name, value in given.items():
            options_given += [f"--{name}", str(value)] if value is not None else []
        note(f"the whole report: {suggest('report', *captures, *options_given, '-o', 'report.html')}")
    else:
        note(f"{output}: open it in a browser")


@contextlib.contextmanager
def _findings_of(
    captures: list[Path],
    memory: int | None,
    ranks: list[int] | None,
    choose_window: Callable[[Timeline], tuple[int, int] | None],
    link_limit: float | None,
    how: dict[str, Any],
) -> Iterator[Findings]:
    """Yields the findings: of a capture in memory, or where it does not fit, in windows. how: to load it."""
    from tracekern.analysis.findings import analyze
    from tracekern.analysis.in_windows import CannotBeCut, Cost, findings_in_windows
    from tracekern.timeline.load import load
    from tracekern.timeline.select import select

    cost = Cost.of(captures, memory, how["every"])
    if cost.fits:
        line = f"in memory: {cost.in_memory()}" if memory is not None else ""
    elif ranks is not None:
        raise BadInput(f"--ranks: {cost.in_windows()}, and windows are of all ranks; name their dumps with --partial")
    else:
        with contextlib.ExitStack() as stack:
            try:
                if not cost.why_whole:
                    note(f"in windows: {cost.in_windows()}")
                tell = stack.enter_context(progress("reading ranks"))
                in_windows = findings_in_windows(captures, cost, tell, note, choose_window, link_limit, how)
                found = stack.enter_context(in_windows)
            except CannotBeCut as error:
                line = f"in memory: {cost.require(cost.num_spans, str(error))}"
            else:
                options.check_window_of_parts((part.timeline for part in found.parts), found.window, of_kernels=True)
                yield found
                return
    if line:
        note(line)
    with working("reading and analysing the captures"):
        timeline = select(load(captures, **how), ranks=ranks)
        findings = analyze(timeline, link_limit, choose_window(timeline))
    yield findings


def _tell(findings: Findings, captures: list[Path], output: Path | None, as_json: bool) -> None:
    """Prints the lines, or all as JSON, and writes the page."""
    from tracekern.viewers.report.headlines import headlines

    lines = headlines(findings)
    if output is not None:
        _write_page(findings, captures, output)
    if as_json:
        print_json({"file": str(output) if output else None, **as_data(findings, lines)})
        return
    _print_lines(lines)
    if not findings.damage:
        print_stages(findings.stages, findings.window is not None)
        _print_nodes(findings)


def as_data(findings: Findings, lines: Sequence[Line]) -> dict[str, Any]:
    """What `--json` prints. lines: headlines(findings)."""
    told = {line.word: line.text for line in lines}
    return {**told, **_held_up(findings), "answer": _answer(findings.answer), **_paths(findings), **_tables(findings)}


def _check_page(output: Path | None, link_limit: float | None) -> None:
    if link_limit is not None and not 0 < link_limit < float("inf"):
        raise BadInput(f"--link-limit: got {link_limit:g}, wanted GB/s above 0")
    if output is not None and output.suffix not in (".html", ".htm"):
        raise BadInput(f"report: {output}: the report is a page; wanted a name that ends in .html")
    options.check_files(output)


def _print_lines(lines: list[Line]) -> None:
    out = console()
    width = max(len(line.word) for line in lines)
    for line in lines:
        out.print(f"{line.word:>{width}}  ", style="bold", end="")
        out.print(line.text, soft_wrap=True)


def _print_nodes(findings: Findings) -> None:
    """Prints how long nodes waited for each other; nothing where all ranks are on one."""
    from tracekern.viewers.report.questions.nodes import NUMBERS, WORDS, about_pairs, pair_rows

    if findings.nodes is None or not findings.nodes.count.any():
        return
    out, grid = console(), table([*NUMBERS], [*WORDS])
    for numbers, words in pair_rows(findings.nodes):
        grid.add_row(*numbers, *words)
    out.print()
    out.print(about_pairs(findings.nodes))
    out.print(grid)


def _held_up(findings: Findings) -> dict[str, Any]:
    """Who died or did not come, and what each rank waited for; nothing of a run that ended."""
    died = {"deaths": [dataclasses.asdict(death) for death in findings.deaths]} if findings.deaths else {}
    return {**died, "held_up": dataclasses.asdict(findings.held_up)} if findings.held_up else died


def _causes(causes: Sequence[Cause]) -> list[dict[str, Any]]:
    return [
        {
            **_cost(cause),
            "within_ns": cause.within_ns,
            "saved_at_least_ns": cause.at_least_ns,
            "together_ns": cause.together_ns,
            "together_at_least_ns": cause.together_at_least_ns,
            "is_host": cause.is_host,
            "excess_ns": cause.excess.ns,
            "factor": cause.excess.factor,
            "phase": str(cause.excess.phase) if cause.excess.phase else None,
            "stage": cause.excess.stage or None,
            "warp": cause.excess.warp,
            "between": cause.excess.between,
            "slots": cause.excess.slots or None,
            "pattern": _pattern(cause.finding.pattern) if cause.finding else None,
            "alike_ns": cause.finding.alike_ns if cause.finding else None,
        }
        for cause in causes
    ]


def _answer(answer: Answer) -> dict[str, Any]:
    """What the lines say of costs, as data: ns, ranks and names; None for what is not known."""
    return {
        "makespan_ns": answer.makespan_ns,
        "num_iterations": answer.num_iterations,
        "causes": _causes(answer.causes),
        "halves": _causes(answer.halves),
        "incidents": [{**_cost(incident), "iterations": incident.iterations} for incident in answer.incidents],
        "costs": [_cost(cost) for cost in answer.costs],
        "even_hosts_ns": answer.even_hosts_ns,
        "silence": answer.silence.value if answer.silence else None,
        "note": answer.note,
    }


def _pattern(pattern: Pattern) -> dict[str, Any]:
    """The iterations of a cause: from `begin` until before `until` (None: to the end), each `stride`-th."""
    return {"begin": pattern.begin, "until": pattern.until or None, "stride": pattern.stride}


def _cost(cost: Cause | Cost | Incident) -> dict[str, Any]:
    candidate = cost.candidate
    of_iteration = {"mean_ns": _known(cost.saving.mean_ns), "error_ns": _known(cost.saving.error_ns)}
    of_iteration["most_in"] = cost.saving.largest
    return {
        "kind": candidate.kind.value,
        "rank": candidate.rank,
        "peer": candidate.peer if candidate.peer >= 0 else None,
        "others": candidate.others,
        "node": candidate.node or None,
        "channel": candidate.channel or None,
        "saved_ns": cost.saving.whole_ns,
        "by_iteration": of_iteration,
        "more_than_peers_ns": cost.excess_ns,
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _paths(findings: Findings) -> dict[str, Any]:
    """The parts of the critical path, and why the longest wait of each phase lasted."""
    whole = None if findings.damage else findings.critical_path.whole
    if whole is None:
        return {"critical_path": None, "longest_waits": []}
    chains = [
        {
            "rank": chain.rank,
            "phase": str(chain.phase),
            "start_ns": chain.start_ns,
            "wait_ns": chain.wait_ns,
            "is_start_up": chain.is_start_up,
            "chain": [_part(link) for link in chain.links],
        }
        for chain in findings.longest_waits
    ]
    parts = [_part(part) for part in whole.parts]
    path = {"start_ns": whole.start_ns, "end_ns": whole.end_ns, "parts": parts}
    return {"critical_path": path, "longest_waits": chains}


def _part(part: PathPart) -> dict[str, Any]:
    return {
        "kind": part.kind.name.lower(),
        "rank": part.rank,
        "peer": part.peer if part.peer >= 0 else None,
        "phase": str(part.phase) or None,
        "time_ns": part.time_ns,
    }


def _tables(findings: Findings) -> dict[str, Any]:
    """Device times by stage and rank, waits by pair of nodes, rings that were full or dry and how full rings were, and
    what each rank received, [local expert][source] in lists, where the capture says so."""
    if findings.damage:
        return {}
    rings = [dataclasses.asdict(ring) for ring in findings.full_rings]
    always: dict[str, Any] = {"stages": findings.stages.as_dict(), "full_rings": rings}
    if findings.groups:
        always["group_waits"] = [group.as_dict() for group in findings.groups]
    if findings.nodes:
        always["node_waits"] = findings.nodes.as_dict()
    if findings.ring_fills:
        always["ring_fills"] = [dataclasses.asdict(fill) for fill in findings.ring_fills]
        always["dry_rings"] = [dataclasses.asdict(ring) for ring in findings.dry_rings]
    if findings.received is None:
        return always
    of_ranks = ((rank.rank, findings.received.of_rank(rank.rank)) for rank in findings.timeline.ranks)
    return {
        **always,
        "receive_matrix": [
            {
                "rank": rank,
                "local_experts": own.rows[1].tolist(),
                "sources": own.sources.tolist(),
                **{name: own.grid(getattr(own, name)).tolist() for name in ("tokens", "wait_ns", "copies", "copy_ns")},
            }
            for rank, own in of_ranks
        ],
    }


def _write_page(findings: Findings, captures: list[Path], output: Path) -> None:
    from tracekern.dump.format import TRACE_NAME
    from tracekern.files import write_whole
    from tracekern.viewers.report.report_page import report_page

    if len(captures) == 1:
        command = suggest("open", *captures)
    else:
        command = f"{suggest('merge', *captures, '-o', TRACE_NAME)} && {suggest('open', TRACE_NAME)}"
    names = ", ".join(map(str, captures))
    write_whole(output, report_page(findings, captures[0].resolve().name, names, command))
