"""`tracekern run moe`: runs calls of a kernel family on several ranks, records them, leaves a capture and a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekern.cli import options
from tracekern.cli.commands.info import clock, print_losses, share
from tracekern.cli.commands.salvage import note_dead_runs
from tracekern.cli.flags import takes_flags_of
from tracekern.cli.output import (
    Command,
    console,
    note,
    print_json,
    progress,
    show_it,
    suggest,
    table,
    warnings_as_notes,
)
from tracekern.cli.stage_table import print_stages
from tracekern.cli.sweep_table import print_sweep
from tracekern.errors import BadInput, TracekernError, missing_package
from tracekern.formatting import count, duration
from tracekern.launcher.spawner import Spawner
from tracekern.moe.families import FAMILY_OF, VARIANTS, all_options, reference_name, takes_option
from tracekern.moe.workload.options import MoeRun, UnsuitableShape
from tracekern.moe.workload.run import WORKER, run

if TYPE_CHECKING:
    from tracekern.analysis.questions.stages import StageTimes
    from tracekern.analysis.questions.summary import RankSummary, Summary
    from tracekern.moe.workload.reports import RankReport, RunReport


def _parse_options(given: list[str], **named: str) -> dict[str, int]:
    """Parses NAME=VALUE texts into a dict, and options that have a flag of their own. Raises BadInput."""
    known = {option.name: option for option in all_options()}
    options = {}
    for text in [*given, *(f"{name}={value}" for name, value in named.items() if value)]:
        name, _, value = text.partition("=")
        if name in known and known[name].names:
            options[name] = known[name].parse(value)
            continue
        try:
            options[name] = int(value)
        except ValueError:
            raise BadInput(f"--option is {text!r}; wanted NAME=NUMBER, such as partitions=4") from None
    return options


app = typer.Typer(add_completion=False)
_options_of_variants = " ".join(f"{option.name}: {option.help}" for option in all_options())
_Option = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help=f"Options of some variants. {_options_of_variants}"),
]


@app.command(cls=Command, epilog="Example: tracekern run moe --variant pipelined --ranks 4 -o my-capture")
@takes_flags_of(MoeRun)
def moe(
    context: typer.Context,
    output: options.Directory = None,
    *,
    option: _Option = None,
    dispatch_dtype: Annotated[str, typer.Option(help="What low_latency sends in dispatch: fp8 or bf16.")] = "",
    nodes: Annotated[
        int, typer.Option(help="Nodes of two_hop, and of --slow-link or --transport fabric; 0: two, or more.")
    ] = 0,
    channels: Annotated[int, typer.Option(help="Channels of two_hop; 0: 2 on the CPU, on a GPU up to 10.")] = 0,
    nvl_send: Annotated[int, typer.Option(help="Tokens of a chunk of two_hop within a node.")] = 0,
    nvl_recv: Annotated[int, typer.Option(help="Slots of its rings there.")] = 0,
    rdma_send: Annotated[int, typer.Option(help="Tokens of a chunk of two_hop to another node.")] = 0,
    rdma_recv: Annotated[int, typer.Option(help="Slots of its rings there: whole chunks, at least 6 more.")] = 0,
    as_json: options.Json = False,
    **flags: Any,
) -> None:
    """MoE dispatch, experts and combine. Ends with 0 only if results equal the reference, bit by bit.

    reduce and pipelined add up at the experts' ranks: their reference does so in the same order.
    """
    _check_torch()
    plans = _plans_of(context, flags)
    if flags["sweep_blocks"] and output is not None:
        raise BadInput(
            "--sweep-blocks makes no capture; leave -o out, and record a run with the --blocks that it names"
        )
    _check_capture(flags["trace"] and not flags["sweep_blocks"], output, flags["torch_profiler"])
    note_dead_runs()
    with _sigterm_as_interrupt() as terminated:
        _tell(_run_all(plans, output, as_json, terminated), as_json)


def _plans_of(context: typer.Context, flags: dict[str, Any]) -> list[MoeRun]:
    """Returns the runs that the command asks for. Raises BadInput."""
    blocks, stage_blocks = options.parse_blocks(flags["blocks"])
    given = {
        **flags,
        "records_per_track": options.parse_records(flags["records_per_track"]),
        "link_nodes": context.params["nodes"] if _has_link(flags) else 0,
        "detail": options.parse_detail(flags["detail"]),
        "blocks": blocks,
        "stage_blocks": stage_blocks,
        "trace": flags["trace"] and not flags["sweep_blocks"],
        "command": shlex.join(["tracekern", *sys.argv[1:]]),
    }
    with _naming_options(context):
        given["family_options"] = _parse_options(context.params["option"] or [], **_options_with_flags(context.params))
        return _plans_of_all(given) if given["variant"] == "all" else [MoeRun(**given)]


def _options_with_flags(params: dict[str, Any]) -> dict[str, str]:
    """Returns the options of families that have a flag of their own, as they were typed; "" for none."""
    given = {option.name: params[option.name] for option in all_options() if option.name in params}
    if _has_link(params) and params["variant"] != "all" and not takes_option(params["variant"], "nodes"):
        given.pop("nodes")  # they are those of the link
    return {name: str(value or "") for name, value in given.items()}


def _has_link(params: dict[str, Any]) -> bool:
    """Whether --nodes says between which ranks a slow link or a network is."""
    return params["slow_link"] is not None or params["transport"] == "fabric"


def _check_capture(trace: bool, output: Path | None, torch_profiler: bool) -> None:
    if trace and output is None:
        raise BadInput("run moe: no place for the capture; give one with -o DIR, or run with --no-trace")
    if torch_profiler and not trace:
        raise BadInput(
            "--torch-profiler adds to a capture; --no-trace and --sweep-blocks make none; leave one of them out"
        )


def _tell(results: list[_Result], as_json: bool) -> None:
    if as_json:
        all_ok = all(result.report.ok for result in results)
        print_json({"ok": all_ok, "runs": [result.as_dict() for result in results]})
    for result in results:
        result.raise_for_error()


@contextlib.contextmanager
def _naming_options(context: typer.Context) -> Iterator[None]:
    """Rewrites errors of the block, which name fields of MoeRun, to name the options as they are typed."""
    try:
        yield
    except BadInput as error:
        name, told = str(error).split(" ", 1)
        is_option = name.replace("-", "_") in context.params
        raise BadInput(f"--{name.replace('_', '-')} {told}" if is_option else str(error)) from None


def _plans_of_all(given: dict[str, Any]) -> list[MoeRun]:
    """Returns a run of each variant that takes the shape, with the family options that it takes."""
    options = given["family_options"]
    known = {option.name for option in all_options()}  # MoeRun refuses the others
    plans = []
    for variant in FAMILY_OF if given.get("backend") == "cuda" else VARIANTS:  # the others run on the CPU only
        own = {name: value for name, value in options.items() if name not in known or takes_option(variant, name)}
        try:
            plans.append(MoeRun(**{**given, "variant": variant, "family_options": own}))
        except UnsuitableShape as why:
            note(f"{variant} is left out: {why}")
    return plans


class _Terminated(TracekernError):
    exit_code = 143


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[list[int]]:
    """Makes SIGTERM, as job schedulers and `timeout` send it, act like Ctrl-C except for message, exit code and trace.

    Yields a list that holds the signal's number once it has come. SIGKILL may follow soon.
    """
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        if not received:  # `timeout` sends it twice, to the process and to its group
            received.append(number)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    except KeyboardInterrupt:
        if not received:
            raise
        raise _Terminated("ended by SIGTERM") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_torch() -> None:
    """Raises an error if torch is missing. Ranks would report what is missing, but not what to do."""
    if find_spec("torch") is None:
        raise missing_package("run moe", "torch")


@dataclass(frozen=True)
class _Result:
    report: RunReport
    trace: Path | None = None
    summary: Summary | None = None
    stages: StageTimes | None = None
    """Device time of each kernel, where the device drove the calls."""
    trace_error: str = ""
    """Why there is a capture but no trace; "" if there is a trace."""

    def raise_for_error(self) -> None:
        self.report.raise_for_error()
        if self.trace_error:
            raise TracekernError(f"{self.trace_error}; the capture is in {self.report.capture_dir}")

    def as_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.report),
            "trace": str(self.trace) if self.trace else None,
            "summary": self.summary.as_dict() if self.summary else None,
        }


def _run_all(plans: list[MoeRun], output: Path | None, as_json: bool, terminated: list[int]) -> list[_Result]:
    """Runs the plans one after the other, until Ctrl-C; prints each result as soon as it is known.

    terminated: not empty once SIGTERM has come.
    """
    results = []
    with Spawner(WORKER, os.environ) as spawner:
        for plan in plans:
            directory = output / plan.variant if output and len(plans) > 1 else output
            results.append(_run(plan, directory, spawner, terminated))
            if not as_json:
                _print(results[-1])
            if results[-1].report.was_interrupted:
                break
    return results


def _run(plan: MoeRun, directory: Path | None, spawner: Spawner, terminated: list[int]) -> _Result:
    from tracekern.dump.format import TRACE_NAME
    from tracekern.dump.reader import run_in
    from tracekern.segment.directory_lock import locked

    with progress(f"{plan.variant} on {plan.ranks} ranks", plan.iterations) as tell:
        report = run(plan, directory or "", tell, spawner=spawner)
    if not plan.trace:
        return _Result(report)
    directory = Path(report.capture_dir)
    # The directory may also hold dumps of another run: of an earlier one, or of one that goes on.
    dumps = [path for path in sorted(directory.glob("rank_*.tkdump")) if run_in(path) == report.run_id]
    if not report.ok and not dumps:
        return _Result(report)
    if terminated:
        trace = suggest("merge", directory, "--partial", "-o", directory / TRACE_NAME)
        note(f"what was recorded is kept; its trace: {trace}")
        return _Result(report)
    try:
        with locked(directory, report.run_id):  # which the ranks have given up
            return _write_trace(report, directory, dumps)
    except TracekernError as error:
        if report.ok:
            raise
        note(f"no trace of this run: {error}")
        return _Result(report)


def _write_trace(report: RunReport, directory: Path, dumps: list[Path]) -> _Result:
    """Writes the trace. For a failed run it shows what is left, even if ranks left no dump or no clock samples."""
    from tracekern.analysis.questions.stages import stage_times
    from tracekern.analysis.questions.summary import summarize
    from tracekern.dump.format import TRACE_NAME
    from tracekern.export.write import save_in_capture
    from tracekern.timeline.load import load

    with warnings_as_notes(), progress("writing the trace") as tell:
        try:
            timeline = load(dumps, partial=not report.ok)
        except BadInput:
            if report.ok:
                raise
            timeline = load(dumps, partial=True, unaligned=True)
        if not report.ok and not len(timeline.spans):
            raise BadInput("no kernel left a record; with --records-per-track 256 the first call leaves some")
        path, summary = directory / TRACE_NAME, summarize(timeline)
        stages = stage_times(timeline) if _is_device_driven(report) else None
        try:
            save_in_capture(timeline, path, progress=tell)
        except TracekernError as error:
            return _Result(report, summary=summary, stages=stages, trace_error=str(error))
    return _Result(report, path, summary, stages)


def _print(result: _Result) -> None:
    report, out = result.report, console()
    plan = report.options
    out.print(
        f"{plan.variant}: {count(plan.iterations, 'call')} on {count(plan.ranks, 'rank')}, each with up to "
        f"{plan.tokens} tokens a rank of {plan.hidden} {plan.dtype}, top-{plan.topk} of {plan.experts} experts, "
        + ", ".join([f"{plan.routing} routing", *_int4_experts(plan), *_chosen_options(report), *_slow_link(plan)]),
        soft_wrap=True,
    )
    title = result.summary.title if result.summary else ""
    if report.placement and not title.startswith(report.placement):
        out.print(report.placement, soft_wrap=True)
    summaries = {rank.rank: rank for rank in result.summary.ranks} if result.summary else {}
    if plan.sweep_blocks and report.ok:
        print_sweep(plan, report.ranks[0])
    else:
        out.print(_table(plan.variant, [(rank, summaries.get(rank.rank)) for rank in report.ranks]))
    if result.summary:
        if title:
            out.print(title, soft_wrap=True)
        print_losses(out, result.summary, by_run_moe=True)
        if overwritten := result.summary.problems.get("overwritten_records"):
            out.print(
                f"{overwritten:,} older records were overwritten, as --keep last asks: "
                "sent, received, spans and waiting are of what is left"
            )
    if told := _device_time(report):
        out.print(told, soft_wrap=True)
    if result.stages:
        print_stages(result.stages)
    if report.ok:
        num_checked = min((rank.num_checked for rank in report.ranks), default=plan.iterations)
        checked = "every result equals" if num_checked >= plan.iterations else f"the last {num_checked} results equal"
        out.print(f"{checked} the {reference_name(plan.variant).replace('_', ' ')}, bit by bit")
    if result.trace:
        out.print(
            f"trace: {result.trace}   {show_it(result.trace.parent)}",
            soft_wrap=True,
        )


def _device_time(report: RunReport) -> str:
    """Returns what a call takes on the ranks' devices, and how much of that is the wire's; "" if hosts drove it."""
    times_ms = [rank.iteration_ms for rank in report.ranks]
    if not _is_device_driven(report) or not all(times_ms):
        return ""
    slowest_ms = [max(of_call) for of_call in zip(*times_ms, strict=True)]
    median, p90 = (_quantile(slowest_ms, part) * 1e6 for part in (0.5, 0.9))
    medians = [_quantile(of_rank, 0.5) for of_rank in times_ms]
    told = f"a call: {duration(median)} of device time (median of {len(slowest_ms)}; 9 of 10 within {duration(p90)})"
    if len(medians) > 1:
        told += f", longest on rank {medians.index(max(medians))}"
    if least_us := report.ranks[0].least_call_us:
        told += f"; {median / least_us / 1e3:.1f} x what the wires need at least, {duration(least_us * 1e3)}"
    return told


def _is_device_driven(report: RunReport) -> bool:
    return bool(report.ranks) and not any(rank.is_host_driven for rank in report.ranks)


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def _int4_experts(plan: MoeRun) -> list[str]:
    return [f"int4 experts of intermediate size {plan.intermediate}"] if plan.has_int4_experts else []


def _slow_link(plan: MoeRun) -> list[str]:
    if plan.hosts:
        return [f"on {plan.num_link_nodes} nodes with a network in between"]
    if plan.slow_link is None:
        return []
    nodes = [] if takes_option(plan.variant, "nodes") else [f"on {plan.num_link_nodes} nodes"]
    return [*nodes, f"{plan.slow_link:g} GB/s from each rank to other nodes"]


def _chosen_options(report: RunReport) -> list[str]:
    """Returns the family's description of each option of the variant, with the largest value of a rank."""
    variant = report.options.variant
    options = FAMILY_OF[variant].options_of(variant) if variant in FAMILY_OF else []
    values = {option: max(rank.family_options.get(option.name, 0) for rank in report.ranks) for option in options}
    return [said for option, value in values.items() if value and (said := option.describe(value))]


def _table(variant: str, ranks: list[tuple[RankReport, RankSummary | None]]) -> object:
    family = FAMILY_OF.get(variant)
    moved_events = (family.sent_events, family.received_events) if family else ((), ())
    traced = any(summary for _, summary in ranks)
    spans_of_run = {event.event for _, summary in ranks if summary for event in summary.events}
    left = ["result", "longest wait", "clock"] if traced else ["result"]
    of_device = not any(report.is_host_driven for report, _ in ranks)
    unit, number = ("us", 1e3) if of_device else ("ms", 1.0)
    recorded = ["sent", "received", "spans", "waiting"] if traced else []
    grid = table(["rank", "tokens", f"{unit}/call", *recorded], left)
    for report, summary in ranks:
        row = [str(report.rank), "-", "-"]
        if report.iteration_ms:
            row[1:] = [f"{report.tokens:,}", f"{number * sum(report.iteration_ms) / len(report.iteration_ms):,.1f}"]
        if traced and summary:
            counts = {event.event: event.count for event in summary.events}
            moved = [
                f"{sum(counts.get(name, 0) for name in names):,}" if names & spans_of_run else "-"
                for names in map(set, moved_events)
            ]
            row += [*moved, f"{summary.num_spans:,}", share(summary.wait_share)]
        elif traced:
            row += ["-"] * 4
        row.append("equal" if report.ok else f"{report.wrong_elements:,} differ" if report.wrong_elements else "failed")
        if traced:
            row += [_longest_wait(summary), clock(summary)] if summary else ["-", "-"]
        grid.add_row(*row)
    return grid


def _longest_wait(summary: RankSummary) -> str:
    """Returns the longest wait that ended, and how many spans never did, whose length is not known."""
    ended = _longest_ended_wait(summary)
    return f"{ended}; {count(summary.num_open_spans, 'span')} never ended" if summary.num_open_spans else ended


def _longest_ended_wait(summary: RankSummary) -> str:
    waits = [event for event in summary.events if event.event_class == "wait"]
    if not waits:
        return "-"
    longest = max(waits, key=lambda event: event.longest_ns)
    peer = f" for rank {longest.longest_peer}" if longest.longest_peer >= 0 else ""
    return f"{duration(longest.longest_ns)} in {longest.event}{peer}"
