"""`tracekern info`: prints what a capture holds, what it lost, and how well its clocks agree."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekern.cli import options
from tracekern.cli.commands.salvage import naming_the_rest
from tracekern.cli.output import console, print_json, table, working
from tracekern.cli.stage_table import print_stages
from tracekern.errors import BadInput
from tracekern.formatting import count, duration, ranks

if TYPE_CHECKING:
    from rich.console import Console

    from tracekern.analysis.questions.launch_keys import KeyedLaunches
    from tracekern.analysis.questions.summary import RankSummary, Summary
    from tracekern.timeline.model import Problem, Rank, Timeline

_MOST_KEYS = 20
_TOLD_IN_FULL = frozenset({"fault", "event_table", "dense_probes", "cycle_clock", "cycle_rate_unknown"})


def info(
    captures: Annotated[list[Path], typer.Argument(metavar="CAPTURE", help="Capture directories, or single dumps.")],
    unaligned: options.Unaligned = False,
    as_json: options.Json = False,
) -> None:
    """Print ranks, tracks, events, losses and clock bounds of a capture."""
    from tracekern.analysis.questions.launch_keys import launches_by_key
    from tracekern.analysis.questions.stages import stage_times
    from tracekern.analysis.questions.summary import summarize
    from tracekern.timeline.join.damage import damage_of

    with working("reading and aligning the captures"), naming_the_rest(captures):
        timeline, refusal = _load(captures, unaligned)
        summary = summarize(timeline)
        keyed = launches_by_key(timeline)
        stages = None if damage_of(timeline) else stage_times(timeline)
    if as_json:
        told = {
            "keys": [dataclasses.asdict(of_key) for of_key in keyed],
            "recorder": [_recorder(rank) for rank in timeline.ranks],
            "stages": stages.as_dict() if stages else None,
        }
        print_json({**summary.as_dict(), **told})
    else:
        by_run_moe = any(map(_is_by_run_moe, timeline.ranks))
        print_summary(summary, by_run_moe, has_times=stages is not None)
        if keyed and stages:
            console().print(_keys_table(keyed))
        if stages:
            print_stages(stages)
            console().print()
        _print_problems(console(), timeline, summary.problems)
        if not timeline.launches and not timeline.problems:
            console().print("no launch is on record: capture.launch() was not called")
        _print_recorder(console(), timeline)
    if refusal:
        raise refusal


def _load(captures: list[Path], unaligned: bool) -> tuple[Timeline, BadInput | None]:
    """Returns the captures, and the error if their clocks cannot be related.

    The error must not hide what a fault left, so it is not raised here.
    """
    from tracekern.timeline.load import load

    try:
        return load(captures, unaligned=unaligned, partial=True), None
    except BadInput as refusal:
        return load(captures, unaligned=True, partial=True), refusal


def _recorder(rank: Rank) -> dict[str, Any]:
    """Returns where a rank's records went, and what a span cost there."""
    metadata = rank.metadata
    return {"rank": rank.rank, "sinks": metadata.get("sinks", {}), "overhead_ns": metadata.get("overhead_ns", {})}


def where_records_went(sinks_by_rank: list[dict[str, list[str]]]) -> str:
    """Returns one line on the sinks. sinks_by_rank: by rank and kernel, which of "host" and "device" were used."""
    launches = [(name, sinks) for of_rank in sinks_by_rank for name, sinks in of_rank.items()]
    if launches and all(sinks == ["device"] for _, sinks in launches):
        return "records went to device memory"
    mirrored = sorted({name for name, sinks in launches if "device" in sinks})
    also = f"; of {', '.join(mirrored)} to device memory: too many for the bus" if mirrored else ""
    return f"records went to host memory{also}"


def _print_recorder(out: Console, timeline: Timeline) -> None:
    """Prints the recorder's sinks and cost on GPUs; on the CPU backend the cost has no meaning."""
    ranks = [_recorder(rank) for rank in timeline.ranks if rank.backend != "cpu"]
    if ranks:
        out.print(where_records_went([rank["sinks"] for rank in ranks]))
    for rank in ranks[:1]:
        costs = ", ".join(f"{cost:.0f} ns at {warps} warps per SM" for warps, cost in rank["overhead_ns"].items())
        out.print(f"a span costs {costs}" if costs else "what a span costs was not measured")


def print_summary(summary: Summary, by_run_moe: bool = False, has_times: bool = True) -> None:
    """Prints the tables of `info`. has_times: False where these are damaged, so that no figure may be built on them."""
    out = console()
    if summary.title:
        out.print(summary.title)
    counts = (count(len(summary.ranks), "rank"), count(summary.num_spans, "span"), count(summary.num_flows, "arrow"))
    out.print(", ".join([*counts, *([duration(summary.duration_ns)] if has_times else [])]))
    out.print(_ranks_table(summary, has_times))
    if summary.num_spans and has_times:
        out.print(_events_table(summary))
    print_losses(out, summary, by_run_moe)


def _is_by_run_moe(rank: Rank) -> bool:
    """Returns whether `run moe` made the capture, so that advice can name its options."""
    return str(rank.metadata.get("command")).startswith("tracekern run moe")


def _print_problems(out: Console, timeline: Timeline, counts: dict[str, int]) -> None:
    """Prints the count and the first case of each kind of problem, or all cases of kinds in _TOLD_IN_FULL.

    Cases that differ in numbers alone count as one there.
    """
    from tracekern.timeline.model import told_once

    kinds: dict[str, list[Problem]] = {}
    for problem in timeline.problems:
        kinds.setdefault(problem.kind, []).append(problem)
    for kind, met in kinds.items():
        is_in_full = kind in _TOLD_IN_FULL
        for problem in told_once(met) if is_in_full else met[:1]:
            first = "" if is_in_full or len(met) == 1 else f" {counts[kind]:,}, the first:"
            out.print(f"{problem.severity} {kind}:{first} {problem.text}", soft_wrap=True)


def print_losses(out: Console, summary: Summary, by_run_moe: bool) -> None:
    """Prints how many records the ranks lost, with the size that would have been enough, on one line.

    by_run_moe: names the option of `run moe` for it, too.
    """
    lossy = [rank for rank in summary.ranks if rank.records_lost]
    if lossy:
        lost, needed = sum(rank.records_lost for rank in lossy), max(rank.records_needed for rank in lossy)
        room = min(rank.records_per_track for rank in lossy)
        option = f" (--records-per-track {needed})" if by_run_moe else ""
        out.print(
            f"{ranks([rank.rank for rank in lossy])} lost {count(lost, 'record')}: a track had room for {room}; "
            f"records_per_track={needed}{option} would have been enough",
            soft_wrap=True,
        )


def _ranks_table(summary: Summary, has_times: bool) -> object:
    numbers = ["rank", "tracks", "spans", "marks", "open", "lost", "waiting"]
    grid = table(numbers, ["state", "node", "device", "clock"])
    for rank in summary.ranks:
        grid.add_row(
            str(rank.rank),
            f"{rank.num_device_tracks:,}",
            f"{rank.num_spans:,}",
            f"{rank.num_marks:,}",
            f"{rank.num_open_spans:,}",
            _lost(rank),
            share(rank.wait_share) if has_times else "-",
            rank.state,
            rank.node,
            rank.device,
            clock(rank),
        )
    return grid


def _lost(rank: RankSummary) -> str:
    """Returns how many records a rank lost, as far as they could be counted."""
    if not rank.has_lost_more:
        return f"{rank.records_lost:,}"
    return f">{rank.records_lost:,}" if rank.records_lost else "some"


def share(value: float) -> str:
    """Returns 0.25 as "25 %"; "-" if the share is undefined."""
    return "-" if math.isnan(value) else f"{value:.0%}".replace("%", " %")


def clock(rank: RankSummary) -> str:
    """Returns how the rank's clock was related to the axis, with the error bounds."""
    from tracekern.timeline.clocks.pairs import MAX_WANDER_PER_NS

    if rank.clock_of_rank != rank.rank:
        return f"one clock with rank {rank.clock_of_rank}"
    if rank.clock_method == "reference" or not math.isfinite(rank.clock_hard_ns):
        return rank.clock_method
    source = "" if rank.clock_round_trip_ns is None else f" by flows, ±{duration(rank.clock_round_trip_ns)} without"
    doubt = f", {duration(rank.clock_doubt_ns)} of it contradicted" if rank.clock_doubt_ns > 0 else ""
    assumed = "" if rank.clock_is_checked else f", assumes at most {MAX_WANDER_PER_NS * 1e15:g} ppm/s"
    bound = f"{rank.clock_method} ±{duration(rank.clock_hard_ns)}{source}{doubt}"
    return f"{bound}, sigma {duration(rank.clock_sigma_ns)}{assumed}"


def _keys_table(keyed: list[KeyedLaunches]) -> object:
    grid = table(["launches", "median", "longest"], ["key"])
    for of_key in keyed[:_MOST_KEYS]:
        times = [duration(of_key.median_ns), duration(of_key.longest_ns)] if of_key.window else ["-", "-"]
        grid.add_row(f"{of_key.num_launches:,}", *times, of_key.key)
    if len(keyed) > _MOST_KEYS:
        grid.add_row("", "", "", f"and {count(len(keyed) - _MOST_KEYS, 'more key')}; --json has all")
    return grid


def _events_table(summary: Summary) -> object:
    grid = table(["spans", "total", "longest"], ["event", "class", "longest was"])
    names = {(event.event, event.event_class): None for rank in summary.ranks for event in rank.events}
    for name, event_class in names:
        wanted = (name, event_class)
        found = [
            (rank.rank, event)
            for rank in summary.ranks
            for event in rank.events
            if (event.event, event.event_class) == wanted
        ]
        rank_of_longest, longest = max(found, key=lambda entry: entry[1].longest_ns)
        peer = f", peer {longest.longest_peer}" if longest.longest_peer >= 0 else ""
        grid.add_row(
            f"{sum(event.count for _, event in found):,}",
            duration(sum(event.total_ns for _, event in found)),
            duration(longest.longest_ns),
            name,
            event_class,
            f"on rank {rank_of_longest}{peer}",
        )
    return grid
