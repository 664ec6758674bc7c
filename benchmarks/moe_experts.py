"""How long dispatch, K2, K4 and combine take on every rank, read from captures of `run moe --expert int4_sparse`.

    python benchmarks/moe_experts.py [--ranks 8] [--variants fused reduce low_latency] [--tokens 64] [--iterations 12]

On GPUs, one a rank; with fewer GPUs the ranks are resident on one. A kernel's time is that of its launch in the merged
trace, first record to last, in the iterations behind the set-up: medians of each rank. A rank that is through early
waits for the others in its next kernel that receives. Every result is compared with the reference, bit by bit.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, count_gpus, write_results

if TYPE_CHECKING:
    from tracekern.timeline.model import Timeline

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--variants", nargs="+", default=["fused", "reduce", "low_latency"])
    parser.add_argument("--tokens", type=int, default=64, help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    rows = [row for variant in options.variants for row in measure(variant, options)]
    print_tables(options, rows)
    gpus = count_gpus() if options.backend == "cuda" else 0
    where = "" if gpus >= options.ranks else "_resident" if gpus else "_cpu"
    write_results(f"moe_experts_{options.ranks}{where}", {**vars(options), "rows": rows}, min(gpus, options.ranks))
    return 0


def measure(variant: str, options: argparse.Namespace) -> list[Row]:
    """A row for each kernel of a run."""
    import tracekern
    from tracekern.moe.workload.options import MoeRun
    from tracekern.moe.workload.run import run

    sizes = ("ranks", "tokens", "hidden", "intermediate", "experts", "topk", "iterations", "backend")
    about = {name: getattr(options, name) for name in sizes}
    command = shlex.join(["python", *sys.argv])
    workload = MoeRun(variant=variant, expert="int4_sparse", uneven=False, routing="uniform", command=command, **about)
    with tempfile.TemporaryDirectory(prefix="tracekern-experts-") as directory:
        run(workload, directory).raise_for_error()
        return [{"variant": variant, **row} for row in kernel_times(tracekern.load(directory))]


def kernel_times(timeline: Timeline) -> list[Row]:
    """Kernels in the order of their launches: {"kernel", "us": median of each rank}."""
    from tracekern.timeline.facts.iterations import LaunchIterations
    from tracekern.timeline.model import TrackKind

    is_measured, spans = LaunchIterations(timeline).is_measured, timeline.spans
    of_lanes = timeline.tracks_of(TrackKind.LAUNCH)[spans.track]
    times: dict[str, dict[int, list[float]]] = {}
    for at in of_lanes.nonzero()[0]:
        launch = timeline.launches[spans.launch[at]]
        if is_measured[spans.launch[at]]:
            of_rank = times.setdefault(launch.name, {}).setdefault(launch.rank, [])
            of_rank.append(float(spans.end[at] - spans.start[at]) / 1e3)
    return [
        {"kernel": kernel, "us": [statistics.median(of_rank[rank]) for rank in sorted(of_rank)]}
        for kernel, of_rank in times.items()
    ]


def print_tables(options: argparse.Namespace, rows: list[Row]) -> None:
    for variant in options.variants:
        title = f"{variant}, {options.tokens} tokens, {options.experts} int4 experts, us"
        table = Table(title, ["kernel", *(f"rank {rank}" for rank in range(options.ranks))])
        for row in rows:
            if row["variant"] == variant:
                table.add(row["kernel"], *(f"{us:.1f}" for us in row["us"]))
        table.print()


if __name__ == "__main__":
    from tracekern.errors import TracekernError

    try:
        sys.exit(main())
    except TracekernError as error:
        print(f"moe_experts: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
