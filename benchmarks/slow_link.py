"""What crosses the link between nodes: bytes of each variant's dispatch and combine, counted from the records of calls.

    python benchmarks/slow_link.py [--ranks 8] [--nodes 2] [--tokens 32] [--topk 8] [--experts 64]

Calls run on the CPU backend. Ranks of all variants are split into the same nodes, in their order. "rows" are those of
bf16 that as many bytes would be, for each token; hidden 7168. Only two_hop knows of nodes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, write_results

import tracekern
from tracekern.moe.options import MoeRun
from tracekern.moe.run import run
from tracekern.timeline.model import EventClass, Timeline, field_values
from tracekern.timeline.span_facts import bytes_of_spans

Int64 = npt.NDArray[np.int64]

HIDDEN = 7168
VARIANTS = ("two_hop", "reduce", "dedup", "token", "low_latency")
STORES = ("issue_put", "copy_token", "copy_row", "send_partial", "send_result", "send_message")
"""Events that write to other ranks."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("ranks", 8), ("nodes", 2), ("tokens", 32), ("topk", 8), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    options = parser.parse_args()
    rows = [measure(variant, options) for variant in VARIANTS]
    about = f"{options.ranks} ranks on {options.nodes} nodes, top-{options.topk} of {options.experts} experts"
    table = Table(f"across nodes, for each token: {about}", ["variant", "dispatch", "combine", "rows", "of two_hop"])
    for row in rows:
        share = (row["dispatch_bytes"] + row["combine_bytes"]) / (rows[0]["dispatch_bytes"] + rows[0]["combine_bytes"])
        row["of_two_hop"] = share
        cells = [f"{row[kernel + '_bytes'] / 1e3:.1f} kB" for kernel in ("dispatch", "combine")]
        table.add(row["variant"], *cells, f"{row['rows']:.2f}", f"{share:.2f}")
    table.print()
    write_results("slow_link", {**vars(options), "hidden": HIDDEN, "rows": rows}, 0)
    return 0


def measure(variant: str, options: argparse.Namespace) -> dict[str, float | str]:
    """Bytes of a call between nodes, for each token of all ranks."""
    own = {"nodes": options.nodes} if variant == "two_hop" else {}
    plan = MoeRun(
        ranks=options.ranks,
        variant=variant,
        backend="cpu",
        tokens=options.tokens,
        hidden=HIDDEN,
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
    found = {
        f"{kernel}_bytes": bytes_between_nodes(timeline, peers, kernel) / num_tokens
        for kernel in ("dispatch", "combine")
    }
    return {"variant": variant, **found, "rows": sum(found.values()) / (2 * HIDDEN)}


def bytes_between_nodes(timeline: Timeline, peers: int, kernel: str) -> int:
    """Bytes that kernels of such a name write to ranks of other nodes."""
    stores, num_bytes = stores_between_nodes(timeline, peers)
    is_wanted = np.array([*(launch.name.startswith(kernel) for launch in timeline.launches), False])
    return int(num_bytes[is_wanted[timeline.spans.launch[stores]]].sum())


def stores_between_nodes(timeline: Timeline, peers: int) -> tuple[Int64, Int64]:
    """Spans of kernels that write to ranks of other nodes, and their bytes. peers: ranks of a node."""
    spans, num_bytes = timeline.spans, bytes_of_spans(timeline)
    node = timeline.track_ranks()[spans.track] // peers
    found = []
    for idx, event in enumerate(timeline.events):
        if event.event_class is not EventClass.WORK or event.name not in STORES:
            continue
        rows = np.flatnonzero((spans.event == idx) & (num_bytes > 0) & (spans.launch >= 0))
        to_rank, to_node = (field_values(event, field, spans, rows) for field in ("peer", "node"))
        target = to_node if to_rank is None else to_rank // peers
        if target is not None:
            found.append(rows[target != node[rows]])
    stores = np.concatenate(found)
    return stores, num_bytes[stores]


if __name__ == "__main__":
    sys.exit(main())
