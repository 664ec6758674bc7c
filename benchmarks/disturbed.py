"""Whom does the report name when a rank's host is late, or a link is busy with something else?

    python benchmarks/disturbed.py [--ranks 2] [--calls 12]
    python benchmarks/disturbed.py --ranks 8 --resident      # all of them side by side on one GPU: a rehearsal
    python benchmarks/disturbed.py --ranks 4 --pairs 10      # is a late host's cost what runs without it take less?

The balanced pipeline runs on all ranks, once for each disturbance: none; the host of the last rank
sleeps 300 us before each call; rank 0 copies to the GPU of rank 1 without end in another stream. Prints the median time
of a call on the device and what `tracekern report` says first of the capture.

With --pairs, runs without and with the late host alternate, and nothing else is run. Prints by how much each was longer
than the one before it, and what the analysis says that it would save without that host.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, require_gpus, write_results
from ranks import Row, placement, print_row, run_ranks, this_rank

SHAPE = {"num_experts": 64, "topk": 8, "hidden": 7168, "dtype": "bf16"}
DISTURBANCES = ("none", "late host", "busy link")
LATE_S = 300e-6
COPY_BYTES = 64 << 20
"""Of one copy: some 0.2 ms over NVLink."""
WARM_UP = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of each rank")
    parser.add_argument("--calls", type=int, default=12, help="recorded calls of each disturbance")
    parser.add_argument("--resident", action="store_true", help="all ranks in one process, side by side on one GPU")
    parser.add_argument("--pairs", type=int, default=0, help="runs without and with the late host")
    parser.add_argument("--keep", metavar="DIRECTORY", help="where the captures stay; nowhere if left out")
    options = parser.parse_args()
    require_gpus(1 if options.resident else options.ranks)
    with tempfile.TemporaryDirectory(prefix="tracekern-disturbed-") as temporary:
        directory = options.directory = options.keep or temporary
        samples = run_ranks(f"{Path(__file__).stem}:measure", options)
        if options.pairs:
            return compare_pairs(options, Path(directory))
        rows = [
            {"disturbance": disturbance, "us": of_all, "report": report(Path(directory, disturbance))}
            for disturbance, of_all in zip(DISTURBANCES, medians(samples), strict=True)
        ]
    table = Table(f"{options.ranks} ranks, {placement(options)}", ["disturbance", "slowest rank us", "fastest rank us"])
    for row in rows:
        table.add(row["disturbance"], f"{max(row['us']):.1f}", f"{min(row['us']):.1f}")
    table.print()
    for row in rows:
        print(f"{row['disturbance']}:", *row["report"], sep="\n    ")
    about = {
        "ranks": options.ranks,
        "placement": placement(options),
        "tokens": options.tokens,
        "shape": SHAPE,
        "rows": rows,
    }
    name = f"disturbed_{options.ranks}" + ("_resident" if options.resident else "")
    write_results(name, about, 1 if options.resident else options.ranks)
    return 0


def compare_pairs(options: argparse.Namespace, directory: Path) -> int:
    """Prints measured and predicted savings of each pair, and whether the mean lies in the measured 95 % interval."""
    from scipy.stats import t

    import tracekern

    columns = ["pair", "longer us", "would save us", "named"]
    table = Table(f"late host, {options.ranks} ranks, {placement(options)}", columns)
    rows = []
    for pair in range(options.pairs):
        without, late = (
            tracekern.analyze(tracekern.load(directory / path_of(disturbance, pair))).answer
            for disturbance in ("none", "late host")
        )
        saved = [cost.saving.whole_ns for cost in late.costs if is_of_late_host(cost.candidate, options.ranks)]
        named = bool(late.causes) and is_of_late_host(late.causes[0].candidate, options.ranks)
        longer_us = (late.makespan_ns - without.makespan_ns) / 1e3
        rows.append({"longer_us": longer_us, "saved_us": saved[0] / 1e3 if saved else 0.0, "named": named})
        table.add(str(pair), f"{longer_us:.0f}", f"{rows[-1]['saved_us']:.0f}", "yes" if named else "no")
    table.print()
    longer, saves = ([row[key] for row in rows] for key in ("longer_us", "saved_us"))
    mean, saved_us = statistics.mean(longer), statistics.mean(saves)
    half = float(t.isf(0.025, len(rows) - 1)) * statistics.stdev(longer) / len(rows) ** 0.5
    is_inside = abs(saved_us - mean) <= half
    where = "inside" if is_inside else "OUTSIDE"
    print(f"longer by {mean:.0f} ± {half:.0f} us (95 %); would save {saved_us:.0f} us: {where}")
    about = {
        "ranks": options.ranks,
        "placement": placement(options),
        "tokens": options.tokens,
        "shape": SHAPE,
        "calls": options.calls,
    }
    figures = {"mean_longer_us": mean, "half_width_us": half, "mean_saved_us": saved_us, "is_inside": is_inside}
    name = f"late_host_{options.ranks}" + ("_resident" if options.resident else "")
    results = {**about, "late_us": LATE_S * 1e6, "rows": rows, **figures}
    write_results(name, results, 1 if options.resident else options.ranks)
    return 0


def is_of_late_host(candidate: Any, num_ranks: int) -> bool:
    return candidate.kind.value == "host" and candidate.rank == num_ranks - 1


def path_of(disturbance: str, pair: int) -> str:
    return f"{disturbance} {pair}"


def medians(samples: list[list[Row]]) -> list[list[float]]:
    """[disturbance][rank] us."""
    return [[statistics.median(row["us"]) for row in of_all] for of_all in zip(*samples, strict=True)]


def report(directory: Path) -> list[str]:
    command = [sys.executable, "-m", "tracekern", "report", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def measure() -> None:
    """One rank: prints a row for each disturbance."""
    with this_rank() as (options, group):
        measure_rank(options, group)


def measure_rank(options: argparse.Namespace, group: Any) -> None:
    import torch

    from tracekern.moe.experts import draw_experts
    from tracekern.moe.p2p.pipeline import P2PPipeline
    from tracekern.moe.routing import draw_batch
    from tracekern.moe.shape import MoeShape
    from tracekern.record.session import capture

    shape = MoeShape(num_ranks=options.ranks, max_tokens=options.tokens, **SHAPE)
    grid = {"num_blocks": 128 // (options.ranks if options.resident else 1), "warps_per_block": 16}
    pipeline = P2PPipeline(group, shape, "balanced", backend="cuda", **grid)
    batch = draw_batch(shape, seed=1, rank=group.rank, iteration=0, routing="uniform", uneven=False).to("cuda")
    tensors = (batch.x, batch.topk_idx, batch.topk_weights, draw_experts(shape).to("cuda"))
    out = torch.empty_like(batch.x)
    busy = Copies(group.rank, torch.cuda.device_count())
    for _ in range(WARM_UP):
        pipeline(*tensors, out=out)
    pipeline.synchronize()
    runs = [(disturbance, disturbance) for disturbance in DISTURBANCES]
    if options.pairs:
        pairs = itertools.product(range(options.pairs), ("none", "late host"))
        runs = [(path_of(disturbance, pair), disturbance) for pair, disturbance in pairs]
    for name, disturbance in runs:
        path = Path(options.directory, name)
        times = []
        with capture(path, device=pipeline.comm.device, sink="device", max_bytes=1 << 30) as session:
            with session.counting():
                pipeline(*tensors, out=out, capture=session)
                pipeline.synchronize()
            for _ in range(WARM_UP + options.calls):
                before, behind = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if disturbance == "late host" and group.rank == options.ranks - 1:
                    time.sleep(LATE_S)
                if disturbance == "busy link" and group.rank == 0:
                    busy.queue()
                before.record()
                pipeline(*tensors, out=out, capture=session)
                behind.record()
                behind.synchronize()  # and not for the copies: then their rank's host would be late
                times.append(before.elapsed_time(behind) * 1e3)
            pipeline.synchronize()
        group.barrier()
        print_row(group.rank, {"us": times[WARM_UP:]})


class Copies:
    """Copies from this GPU to the next, in a stream of their own."""

    def __init__(self, rank: int, num_gpus: int) -> None:
        import torch

        self.stream = torch.cuda.Stream()
        self.there = self.here = torch.empty(0)
        if rank == 0:
            self.here = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
            self.there = torch.empty_like(self.here, device=f"cuda:{1 % num_gpus}")
            self.there.copy_(self.here)  # the first one maps memory of the peer, which takes 0.4 s

    def queue(self) -> None:
        """More than a call takes: the link is busy until the last one is over."""
        import torch

        with torch.cuda.stream(self.stream):
            for _ in range(4):
                self.there.copy_(self.here, non_blocking=True)


if __name__ == "__main__":
    sys.exit(main())
