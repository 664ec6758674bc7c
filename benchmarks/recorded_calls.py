"""What a capture costs the calls it records: device times of `run moe`'s calls with and without one, median and tail.

    python benchmarks/recorded_calls.py --ranks 4                 # on GPUs; CUDA events around each call in both arms
    python benchmarks/recorded_calls.py --ranks 2 --backend cpu --hidden 256 --experts 16 --calls 50

Runs alternate, off and on, --pairs times. In each all calls are back to back behind barriers on the device; a sample is
the slowest rank's time of one call. Nothing may be reserved, loaded or collected while calls are recorded: that shows
in the 99th percentile. Figures are medians over the pairs; on the CPU backend they prove coverage only. Exits with 1
where a traced launch ran unrecorded: then take fewer --calls.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from harness import Table, count_gpus, require_gpus, write_results

from tracekern.dump.reader import read_dump
from tracekern.launcher.spawner import Spawner
from tracekern.moe.options import MoeRun
from tracekern.moe.run import WORKER, run

DEFAULTS = {"ranks": 4, "hidden": 7168, "experts": 256, "topk": 8, "calls": 1000, "pairs": 5}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--variants", nargs="+", default=["pipelined", "reduce", "low_latency"])
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    if options.backend == "cuda":
        require_gpus(1)
    rows = []
    with Spawner(WORKER, os.environ) as spawner:
        for variant in options.variants:
            for tokens in options.tokens:
                if variant == "low_latency" and tokens > 128:
                    continue
                rows.append({"variant": variant, "tokens": tokens, **compare(options, variant, tokens, spawner)})
                print(f"{variant}, {tokens} tokens: {rows[-1]['median']:.3f}, p99 {rows[-1]['p99']:.3f}", flush=True)
    print_rows(options, rows)
    num_gpus = min(options.ranks, count_gpus()) if options.backend == "cuda" else 0
    write_results(f"recorded_calls_{options.ranks}", {**vars(options), "rows": rows}, num_gpus)
    unrecorded = sum(row["unrecorded"] for row in rows)
    if unrecorded:
        print(f"recorded_calls: {unrecorded:.0f} traced launches ran unrecorded: no measurement; take fewer --calls")
    return 1 if unrecorded else 0


def compare(options: argparse.Namespace, variant: str, tokens: int, spawner: Spawner) -> dict[str, float]:
    ratios: dict[str, list[float]] = {"median": [], "p99": []}
    medians_us: list[float] = []
    unrecorded = 0
    for pair in range(options.pairs):
        moe = [workload(options, variant, tokens, traced, seed=pair + 1) for traced in (False, True)]
        (off, _), (on, refused) = (call_times(one, spawner) for one in moe)
        unrecorded += refused
        medians_us.append(quantile(off, 0.5) * 1e3)
        ratios["median"].append(quantile(on, 0.5) / quantile(off, 0.5))
        ratios["p99"].append(quantile(on, 0.99) / quantile(off, 0.99))
    found = {"off_us": statistics.median(medians_us), "unrecorded": unrecorded}
    for name, values in ratios.items():
        found |= {name: statistics.median(values), f"{name}_low": min(values), f"{name}_high": max(values)}
    return found


def workload(options: argparse.Namespace, variant: str, tokens: int, traced: bool, seed: int) -> MoeRun:
    shape = {name: getattr(options, name) for name in ("ranks", "hidden", "experts", "topk", "backend")}
    return MoeRun(
        **shape,
        variant=variant,
        tokens=tokens,
        routing="uniform",
        uneven=False,
        iterations=options.calls,
        trace=traced,
        host_driven=False,
        seed=seed,
    )


def call_times(moe: MoeRun, spawner: Spawner) -> tuple[list[float], int]:
    """Returns ms of each call on its slowest rank, and how many launches of a traced run were not recorded."""
    with tempfile.TemporaryDirectory() as directory:
        report = run(moe, directory, spawner=spawner)
        report.raise_for_error()
        dumps = Path(report.capture_dir).glob("*.tkdump") if moe.trace else ()
        unrecorded = sum(read_dump(path).metadata["launches_refused"] for path in dumps)
    times = [max(of_call) for of_call in zip(*(rank.iteration_ms for rank in report.ranks), strict=True)]
    return times, unrecorded


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def print_rows(options: argparse.Namespace, rows: list[dict]) -> None:
    columns = ["variant", "tokens", "off us", "median on/off", "over pairs", "p99 on/off", "over pairs"]
    table = Table(
        f"{options.calls} calls back to back on {options.ranks} ranks, {options.pairs} pairs of runs", columns
    )
    for row in rows:
        spread = [f"{row[f'{name}_low']:.3f}..{row[f'{name}_high']:.3f}" for name in ("median", "p99")]
        ratio = [f"{row[name]:.3f}" for name in ("median", "p99")]
        table.add(row["variant"], str(row["tokens"]), f"{row['off_us']:.1f}", ratio[0], spread[0], ratio[1], spread[1])
    table.print()


if __name__ == "__main__":
    raise SystemExit(main())
