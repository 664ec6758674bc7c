"""`tracekern info`: what a capture holds, what it lost, how well its clocks agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekern.cli import options
from tracekern.cli.output import console, duration, print_json, working

if TYPE_CHECKING:
    from tracekern.analysis.summary import RankSummary, Summary


def info(
    captures: Annotated[list[Path], typer.Argument(metavar="CAPTURE...", help="Capture directories, or single dumps.")],
    unaligned: options.Unaligned = False,
    as_json: options.Json = False,
) -> None:
    """Print ranks, tracks, events, losses and clock bounds of a capture."""
    from tracekern.analysis.summary import summarize
    from tracekern.timeline.merge import load

    with working("reading and aligning the captures"):
        summary = summarize(load(captures, unaligned=unaligned, partial=True))
    if as_json:
        print_json(summary.as_dict())
    else:
        print_summary(summary)


def print_summary(summary: Summary) -> None:
    """The tables of `info`."""
    out = console()
    if summary.title:
        out.print(summary.title, markup=False)
    out.print(
        f"{len(summary.ranks)} ranks, {summary.num_spans:,} spans, {summary.num_flows:,} arrows, "
        f"{duration(summary.duration_ns)}"
    )
    out.print(_ranks_table(summary))
    out.print(_events_table(summary))
    for rank in summary.ranks:
        if rank.records_lost:
            out.print(
                f"rank {rank.rank} lost {rank.records_lost:,} records: a track had room for "
                f"{rank.records_per_track}; --records-per-track {rank.records_needed} would have been enough"
            )
    for kind, count in summary.problems.items():
        out.print(f"problem {kind}: {count:,}", markup=False)


def _ranks_table(summary: Summary) -> object:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rank", justify="right")
    for name in ("node", "device", "state"):
        table.add_column(name)
    for name in ("tracks", "spans", "marks", "open", "lost", "waiting"):
        table.add_column(name, justify="right")
    table.add_column("clock")
    for rank in summary.ranks:
        table.add_row(
            str(rank.rank),
            rank.node,
            rank.device,
            rank.state,
            f"{rank.num_device_tracks:,}",
            f"{rank.num_spans:,}",
            f"{rank.num_marks:,}",
            f"{rank.num_open_spans:,}",
            f"{rank.records_lost:,}",
            share(rank.wait_share),
            clock(rank),
        )
    return table


def share(value: float) -> str:
    """0.25 as "25 %"; "-" where there was nothing to share."""
    return "-" if math.isnan(value) else f"{value:.0%}".replace("%", " %")


def clock(rank: RankSummary) -> str:
    """How the rank's clock was related to the axis, and how far that can be trusted."""
    if not math.isfinite(rank.clock_hard_ns):
        return rank.clock_method
    return f"{rank.clock_method} ±{duration(rank.clock_hard_ns)} proven, ±{duration(rank.clock_sigma_ns)} repeatable"


def _events_table(summary: Summary) -> object:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("event")
    table.add_column("class")
    for name in ("spans", "total", "longest"):
        table.add_column(name, justify="right")
    table.add_column("longest was")
    names = {(event.event, event.event_class): None for rank in summary.ranks for event in rank.events}
    for name, event_class in names:
        found = [(rank.rank, event) for rank in summary.ranks for event in rank.events if event.event == name]
        rank_of_longest, longest = max(found, key=lambda entry: entry[1].longest_ns)
        peer = f", peer {longest.longest_peer}" if longest.longest_peer >= 0 else ""
        table.add_row(
            name,
            event_class,
            f"{sum(event.count for _, event in found):,}",
            duration(sum(event.total_ns for _, event in found)),
            duration(longest.longest_ns),
            f"on rank {rank_of_longest}{peer}",
        )
    return table
