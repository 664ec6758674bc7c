"""What crosses the link between nodes: bytes of each variant's dispatch and combine, counted from the records of calls.

    python benchmarks/slow_link.py [--ranks 8] [--nodes 2] [--tokens 32] [--topk 8] [--experts 64] [--hidden 7168]
    python benchmarks/slow_link.py --slow-link 0.1 0.03 0.01 [--rounds 15]

Calls run on the CPU backend. Ranks of all variants are split into the same nodes, in their order. "rows" are those of
bf16 that as many bytes would be, for each token. Only two_hop knows of nodes.

With --slow-link calls are timed, too: without a slow link, and where rows leave each rank for other nodes at so many
GB/s. Variants take turns at each rate, and ratios are of calls of one turn. A time is that from the first rank's begin
to the last one's end, of dispatch and of combine, each behind a barrier.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, write_results
from ranks import run_ranks
from slow_link_rank import TIMED

import tracekern
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.run import run
from tracekern.timeline.facts.span_facts import bytes_of_spans
from tracekern.timeline.model import Timeline, field_values

Int64 = npt.NDArray[np.int64]

LEGS = ("dispatch", "combine")
VARIANTS = ("two_hop", "reduce", "dedup", "token", "low_latency")
STORES = ("signal_tail", "copy_token", "copy_row", "send_partial", "send_result", "send_message")
"""Events that write to other ranks, or tell of what was written."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"ranks": 8, "nodes": 2, "tokens": 32, "topk": 8, "experts": 64, "hidden": 7168, "rounds": 15}
    for name, usual in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--slow-link", type=float, nargs="+", default=[], metavar="GBPS", help="rates of the link")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}; wanted 2 or more, for quartiles")
    rows = [measure(variant, options) for variant in VARIANTS]
    shape = f"{options.ranks} ranks on {options.nodes} nodes, top-{options.topk} of {options.experts} experts"
    table = Table(f"across nodes, for each token: {shape}", ["variant", "dispatch", "combine", "rows", "of two_hop"])
    for row in rows:
        share = (row["dispatch_bytes"] + row["combine_bytes"]) / (rows[0]["dispatch_bytes"] + rows[0]["combine_bytes"])
        row["of_two_hop"] = share
        cells = [f"{row[kernel + '_bytes'] / 1e3:.1f} kB" for kernel in LEGS]
        table.add(row["variant"], *cells, f"{row['rows']:.2f}", f"{share:.2f}")
    table.print()
    about = {name: value for name, value in vars(options).items() if name not in ("slow_link", "rounds")}
    if options.slow_link:
        rates = time_calls(options, rows)
        write_results("slow_link_times", {**about, "rounds": options.rounds, "rows": rows, "rates": rates})
    else:
        write_results("slow_link", {**about, "rows": rows})
    return 0


def measure(variant: str, options: argparse.Namespace) -> dict[str, float | str]:
    """Bytes of a call between nodes, for each token of all ranks."""
    own = {"nodes": options.nodes} if variant == "two_hop" else {}
    plan = MoeRun(
        ranks=options.ranks,
        variant=variant,
        backend="cpu",
        tokens=options.tokens,
        hidden=options.hidden,
        experts=options.experts,
        topk=options.topk,
        iterations=1,
        uneven=False,
        routing="uniform",
        family_options=own,
    )
    with tempfile.TemporaryDirectory() as directory:
        report = run(plan, Path(directory))
        if not report.ok:
            raise SystemExit(f"slow_link: {variant}: {'; '.join(report.errors)}")
        timeline = tracekern.load(directory)
    num_tokens, peers = options.ranks * options.tokens, options.ranks // options.nodes
    found = {f"{kernel}_bytes": bytes_between_nodes(timeline, peers, kernel) / num_tokens for kernel in LEGS}
    return {"variant": variant, **found, "rows": sum(found.values()) / (2 * options.hidden)}


def bytes_between_nodes(timeline: Timeline, peers: int, kernel: str) -> int:
    """Bytes that kernels of such a name write to ranks of other nodes."""
    stores, num_bytes = stores_between_nodes(timeline, peers)
    is_wanted = np.array([*(launch.name.startswith(kernel) for launch in timeline.launches), False])
    return int(num_bytes[is_wanted[timeline.spans.launch[stores]]].sum())


def stores_between_nodes(timeline: Timeline, peers: int) -> tuple[Int64, Int64]:
    """Spans of STORES to ranks of other nodes, and their bytes. peers: ranks of a node."""
    spans, num_bytes = timeline.spans, bytes_of_spans(timeline)
    node = timeline.track_ranks()[spans.track] // peers
    found = []
    for idx, event in enumerate(timeline.events):
        if event.name not in STORES:
            continue
        rows = np.flatnonzero((spans.event == idx) & (num_bytes > 0) & (spans.launch >= 0))
        to_rank, to_node = (field_values(event, field, spans, rows) for field in ("peer", "node"))
        target = to_node if to_rank is None else to_rank // peers
        if target is not None:
            found.append(rows[target != node[rows]])
    stores = np.concatenate(found)
    return stores, num_bytes[stores]


def time_calls(options: argparse.Namespace, counted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Times of calls at each rate, and prints them. counted: the bytes of variants."""
    of_ranks = run_ranks("slow_link_rank:measure", argparse.Namespace(**vars(options), resident=False))
    calls = [together(rows) for rows in zip(*of_ranks, strict=True)]
    columns = [cell for leg in LEGS for cell in ("link", leg, "two_hop / it")]
    table = Table("ms of a call, and quartiles of ratios", ["GB/s", "variant", *columns])
    found = []
    for gb_per_s in (0.0, *options.slow_link):
        timed = [call for call in calls if call["round"] and call["gb_per_s"] == gb_per_s]
        of_variant = {variant: [call for call in timed if call["variant"] == variant] for variant in TIMED}
        for variant in TIMED:
            (kind,) = (kind for kind in counted if kind["variant"] == variant)
            row, cells = {"gb_per_s": gb_per_s, "variant": variant}, []
            for leg in LEGS:
                link_ms = kind[f"{leg}_bytes"] * options.tokens / gb_per_s / 1e6 if gb_per_s else 0.0
                row[leg] = summary(leg, of_variant[variant], of_variant["two_hop"]) | {"link_ms": link_ms}
                low, median, high = row[leg]["two_hop_ratio"]
                cells += [f"{link_ms:.1f}", f"{row[leg]['median_ms']:.1f}", f"{median:.2f} ({low:.2f} to {high:.2f})"]
            table.add(f"{gb_per_s:g}" if gb_per_s else "none", variant, *cells)
            found.append(row)
    table.print()
    return found


def together(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A call of all ranks: ms from the first begin to the last end."""
    begins, ends = ({leg: [row[leg][i] for row in rows] for leg in LEGS} for i in (0, 1))
    return rows[0] | {leg: (max(ends[leg]) - min(begins[leg])) / 1e6 for leg in LEGS}


def summary(leg: str, calls: list[dict[str, Any]], two_hop: list[dict[str, Any]]) -> dict[str, Any]:
    """The median, and quartiles. Ratios are those of a call of two_hop to the call of the same turn."""
    took_ms = [call[leg] for call in calls]
    ratios = [own[leg] / ms for own, ms in zip(two_hop, took_ms, strict=True)]
    return {
        "median_ms": statistics.median(took_ms),
        "quartiles_ms": statistics.quantiles(took_ms, n=4),
        "two_hop_ratio": statistics.quantiles(ratios, n=4),
    }


if __name__ == "__main__":
    sys.exit(main())
