"""Arrows of every token over many iterations: does one of them end before it starts?

    python benchmarks/flows.py [--ranks 2] [--backend auto] [--iterations 100]

Records the balanced pipeline, whose signals and waits are those of single tokens, on all ranks; merges the capture, and
looks at every arrow from a signal to the wait it released. A violation is a wait that ends before its signal begins,
once as the merged trace shows it and once beyond what the clocks' hard_ns leaves open. Exits with 1 when there is one,
when a record was lost, a wait has no signal, or the arrows of the tokens are not as many as the routing sent rows. On
the CPU backend the clocks are simulated; ranks that are resident on one GPU read one clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, write_results

if TYPE_CHECKING:
    from tracekern.moe.workload.options import MoeRun
    from tracekern.timeline.model import Timeline

NO_DOUBT = ("dense_probes",)
"""Problems that say nothing of arrows."""
OF_TOKENS = ("token", "result")
"""Channels with one arrow for each row: to its expert, and back."""


def check_arrows(timeline: Timeline) -> list[dict[str, Any]]:
    """A row for each channel, and for those between ranks and within one: arrows, violations, and ns from a signal's
    begin to its wait's end."""
    from tracekern.timeline.model import clocks_of_ranks

    spans, flows = timeline.spans, timeline.flows
    ranks = timeline.track_ranks()[spans.track]
    source, destination = ranks[flows.signal], ranks[flows.wait]
    clock_of = clocks_of_ranks(timeline.ranks)
    hard_ns = np.zeros(len(clock_of))
    for rank in timeline.ranks:
        hard_ns[rank.rank] = rank.clock.hard_ns if rank.clock else 0.0
    apart = source != destination
    slack = np.where(clock_of[source] != clock_of[destination], hard_ns[source] + hard_ns[destination], 0.0)
    took = spans.end[flows.wait] - spans.start[flows.signal]
    channels = [event.channel.name if event.channel else "" for event in timeline.events]
    channel = np.array(channels)[spans.event[flows.signal]]
    rows = []
    for name in sorted(set(channel.tolist())):
        for between in (True, False):
            which = (channel == name) & (apart == between)
            if which.any():
                rows.append(
                    {
                        "channel": name,
                        "between_ranks": between,
                        "arrows": int(which.sum()),
                        "violations": int((took[which] < 0).sum()),
                        "violations_beyond_hard_ns": int((took[which] < -slack[which]).sum()),
                        "least_ns": int(took[which].min()),
                        "median_ns": float(np.median(took[which])),
                    }
                )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64, help="the most a rank draws")
    parser.add_argument("--hidden", type=int, default=2880)
    parser.add_argument(
        "--name",
        help="of the file in benchmarks/results; flows_RANKS otherwise, flows_cpu_RANKS of a CPU run, "
        "flows_resident_RANKS of ranks that are resident on one GPU",
    )
    options = parser.parse_args()

    import tracekern
    from tracekern.moe.workload.options import MoeRun
    from tracekern.moe.workload.run import run

    workload = MoeRun(
        ranks=options.ranks,
        variant="balanced",
        tokens=options.tokens,
        hidden=options.hidden,
        experts=8 * options.ranks,
        iterations=options.iterations,
        backend=options.backend,
        host_driven=True,  # each call has rows of its own
        command=shlex.join(["python", *sys.argv]),
    )
    with tempfile.TemporaryDirectory(prefix="tracekern-flows-") as directory:
        # Counts each iteration's records first, so that none is lost, and checks every result.
        run(workload, directory).raise_for_error()
        timeline = tracekern.load(directory)
    return report(options, timeline, count_rows(workload))


def count_rows(workload: MoeRun) -> int:
    """Rows that the routing tables of all ranks and iterations send to experts."""
    from tracekern.moe.routing import draw_batch

    narrow = dataclasses.replace(workload.shape, hidden=1)  # the routing is drawn before the elements
    about = {"seed": workload.seed, "routing": workload.routing, "uneven": workload.uneven}
    return sum(
        int((draw_batch(narrow, rank=rank, iteration=iteration, **about).topk_idx >= 0).sum())
        for rank in range(workload.ranks)
        for iteration in range(workload.iterations)
    )


def report(options: argparse.Namespace, timeline: Timeline, rows_sent: int) -> int:
    """Prints and writes what was found; the exit code."""
    rows = check_arrows(timeline)
    columns = ["channel", "ranks", "arrows", "violations", "beyond hard_ns", "least ns", "median ns"]
    table = Table(f"{options.iterations} iterations on {options.ranks} ranks", columns)
    for row in rows:
        table.add(
            row["channel"],
            "two" if row["between_ranks"] else "one",
            f"{row['arrows']:,}",
            str(row["violations"]),
            str(row["violations_beyond_hard_ns"]),
            f"{row['least_ns']:,}",
            f"{row['median_ns']:,.0f}",
        )
    table.print()
    arrows, violations = (sum(row[key] for row in rows) for key in ("arrows", "violations"))
    lost = sum(launch.records_lost for launch in timeline.launches)
    doubts = [problem.text for problem in timeline.problems if problem.kind not in NO_DOUBT]
    for channel in OF_TOKENS:
        drawn = sum(row["arrows"] for row in rows if row["channel"] == channel)
        if drawn != rows_sent:
            doubts.append(f"channel {channel}: {drawn} arrows for {rows_sent} rows")
    print(f"{arrows:,} arrows, {violations} violations, {lost} records lost, {len(timeline.spans):,} spans")
    print("\n".join(doubts), end="\n" if doubts else "")
    first = timeline.ranks[0]
    where = "" if first.backend == "cuda" else "cpu_"
    num_gpus = 0 if where else options.ranks
    if first.metadata.get("num_residents", 1) > 1:
        where, num_gpus = "resident_", 1
    results = {
        "ranks": options.ranks,
        "iterations": options.iterations,
        "backend": first.backend,
        "rows_sent": rows_sent,
        "arrows": arrows,
        "violations": violations,
        "records_lost": lost,
        "doubts": doubts,
        "spans": len(timeline.spans),
        "hard_ns": {rank.rank: rank.clock.hard_ns for rank in timeline.ranks if rank.clock},
        "channels": rows,
    }
    # Figures of GPUs of their own are not overwritten.
    write_results(options.name or f"flows_{where}{options.ranks}", results, num_gpus)
    return 1 if violations or lost or doubts else 0


if __name__ == "__main__":
    from tracekern.errors import TracekernError

    try:
        sys.exit(main())
    except TracekernError as error:
        print(f"flows: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
