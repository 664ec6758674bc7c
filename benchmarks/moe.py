"""MoE dispatch, experts and combine, every variant and what others offer, side by side in one run.

    python benchmarks/moe.py --ranks 4                 # on GPUs, one a rank
    python benchmarks/moe.py --ranks 4 --sweep         # partitions, and grids if none is given, for --variants
    python benchmarks/moe.py --ranks 4 --late 0 --late-us 300      # rank 0 comes so much later than the others
    python benchmarks/moe.py --ranks 2 --backend cpu --tokens 12 --hidden 256 --experts 16 --samples 3

Two loads: token counts drawn once from 1 to --tokens for each rank, and --many tokens on every rank. A sample is the
device time of one call between two events of its stream, of the rank that took longest. Before each sample the ranks'
caches are overwritten, every launch of the sample is already queued behind a delay, and a barrier of all ranks on the
device stands right before the first event. How far apart the ranks enter is the entry skew: it is read from a capture
of the last variant's calls, as the spread of the first track's start over the ranks on the common time axis, and no
part of it is taken off the times. Results are checked, bit by bit, before they are timed and behind the last sample.
On the CPU backend figures prove order and coverage only.

On each rank dispatch ends with its last kernel, and combine is the rest. Each leg is that of the rank that it took
longest, and a rank that is through early waits in its combine: together they may be more than the call. What is not
ours stands there with all that a call needs around it, done by plain torch: rows sorted and copied, experts applied
(over all room for rows, in vdev_2d), results added up.

A table for each variant of ours has the time of every kernel, and of the call, on every rank: medians of separate
samples, with an event behind each kernel. It shows imbalance: a rank that is through early waits for the others in its
next kernel that receives. Its last line is the slowest rank's time over the fastest one's. --sweep leaves these figures
in the JSON only.

Bytes are rows alone, of the busiest rank in its busier direction: `once`, a token once for each other rank that has
experts of it; `each`, once for each choice. The limit is the time for `once`, out and back, at 371 GB/s, what stores
reach over NVLink on an H200 (measured 2026-11, 132 blocks of 1,024 threads).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, require_gpus, write_results

from tracekern.moe.calls.wire import WIRE_BYTES_PER_NS, busiest_bytes, count_rows

ROOT = Path(__file__).resolve().parents[1]
SEED = 2026
PEER_LIMIT_S = 60.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", type=int, default=256, help="the most a rank draws")
    parser.add_argument("--many", type=int, default=4096, help="tokens of every rank in the second load; 0: leave out")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--variants", nargs="+", help="of ours; default all, for --sweep the three newest")
    parser.add_argument("--blocks", type=int, default=0, help="of a kernel; 0: 4 on the CPU, on a GPU all SMs but 4")
    parser.add_argument("--warps", type=int, default=0, help="of a block; 0: 4 on the CPU, 16 on a GPU")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--late", type=int, default=-1, help="a rank that begins each call late; -1: none")
    parser.add_argument("--late-us", type=float, default=300.0)
    parser.add_argument("--no-peers", action="store_true", help="leave out what is not ours")
    parser.add_argument("--name", default="moe", help="of the file in benchmarks/results")
    return parser.parse_args()


def loads(options: argparse.Namespace) -> dict[str, list[int]]:
    """Name -> tokens of each rank."""
    drawn = np.random.default_rng(SEED).integers(1, options.tokens + 1, options.ranks).tolist()
    many = {f"{options.many} each": [options.many] * options.ranks} if options.many else {}
    return {f"1..{options.tokens} drawn": drawn, **many}


def traffic(topk_idx: list[np.ndarray], num_ranks: int, num_experts: int, row_bytes: int) -> dict[str, float]:
    """Bytes of the busiest rank in its busier direction, one leg, and the least time of a call."""
    once, each = count_rows(topk_idx, num_ranks, num_experts)
    result = {}
    for name, rows in (("once", once), ("each", each)):
        np.fill_diagonal(rows, 0)
        result[f"{name}_bytes"] = float(busiest_bytes(rows, row_bytes))
    result["limit_us"] = 2 * result["once_bytes"] / WIRE_BYTES_PER_NS / 1e3
    both_ways = max((once.sum(0) + once.sum(1)).max(), 0) * row_bytes
    result["overlapped_limit_us"] = both_ways / WIRE_BYTES_PER_NS / 1e3
    return result


def launch(options: argparse.Namespace, what: str, directory: Path, limit_s: float | None = None) -> str:
    """Runs `what` (a part of moe_rank.py) on all ranks; "" or why it failed."""
    from tracekern.launcher.launch import launch_ranks

    lines: list[str] = []

    def on_line(rank: int, line: str) -> None:
        lines.append(line)
        if what == "ours":
            print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)

    environment = {
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "TRACEKERN_BENCHMARK": json.dumps({**vars(options), "loads": loads(options), "directory": str(directory)}),
        # NVLink multicast stays off; there may be no network to look for.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "NVSHMEM_REMOTE_TRANSPORT": "none",
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "moe_rank.py"), what]
    exits = launch_ranks(options.ranks, command, env=environment, timeout_s=limit_s, on_line=on_line, kill_after_s=3.0)
    if all(ended.returncode == 0 for ended in exits):
        return ""
    if any(ended.stopped and ended.returncode < 0 for ended in exits) and not lines:
        return f"stopped after {limit_s} s"
    said = [line for line in lines if "Error" in line or "error" in line]
    return (said or lines or ["no word"])[-1][:1500]


def collect(directory: Path, num_ranks: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(load, row) -> what each rank measured."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rank in range(num_ranks):
        for path in sorted(directory.glob(f"*.rank{rank}.json")):
            for row in json.loads(path.read_text()):
                rows.setdefault((row["load"], row["name"]), []).append(row)
    return {key: row for key, row in rows.items() if len(row) == num_ranks}


def summarise(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the slowest rank in each sample, us."""
    result: dict[str, Any] = {}
    for leg in ranks[0]["us"]:
        slowest = sorted(np.array([rank["us"][leg] for rank in ranks]).max(axis=0).tolist())
        result[leg] = {
            "median_us": statistics.median(slowest),
            "p10_us": slowest[len(slowest) // 10],
            "p90_us": slowest[len(slowest) * 9 // 10],
        }
    return result


def by_stage(ranks: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Stage -> median us of each rank; {} where the kernels are not ours."""
    if not all("stage_us" in rank for rank in ranks):
        return {}
    return {stage: [rank["stage_us"][stage] for rank in ranks] for stage in ranks[0]["stage_us"]}


def add_rates(row: dict[str, Any], bytes_of: dict[str, float]) -> None:
    """GB/s of the rows that have to travel, `once`, and the share of what the link reaches; both ways for a call."""
    for leg, figures in row.items():
        num_bytes = bytes_of["once_bytes"] * (2 if leg == "call" else 1)
        figures["gb_per_s"] = num_bytes / figures["median_us"] / 1e3
        figures["share_of_limit"] = figures["gb_per_s"] / WIRE_BYTES_PER_NS


def print_load(load: str, bytes_of: dict[str, float], rows: dict[str, dict[str, Any]]) -> None:
    once, limit = bytes_of["once_bytes"], bytes_of["limit_us"]
    table = Table(
        f"\n{load}: {once / 1e6:.2f} MB a leg once, {bytes_of['each_bytes'] / 1e6:.2f} MB each; out and back at "
        f"{WIRE_BYTES_PER_NS:.0f} GB/s {limit:.1f} us, both at once {bytes_of['overlapped_limit_us']:.1f} us",
        ["", "us", "p10", "p90", "x limit", "GB/s once", "dispatch us", "combine us", "GB/s", "GB/s", "vs sorted"],
    )
    base = rows.get("sorted (NCCL)", rows.get("sorted (gloo)"))
    for name, row in sorted(rows.items(), key=lambda item: item[1]["call"]["median_us"]):
        call = row["call"]
        legs = [row.get(leg) for leg in ("dispatch", "combine")]
        table.add(
            name,
            f"{call['median_us']:.1f}",
            f"{call['p10_us']:.1f}",
            f"{call['p90_us']:.1f}",
            f"{call['median_us'] / limit:.2f}" if limit else "-",
            f"{call['gb_per_s']:.0f}",
            *(f"{leg['median_us']:.1f}" if leg else "-" for leg in legs),
            *(f"{leg['gb_per_s']:.0f}" if leg else "-" for leg in legs),
            f"{call['median_us'] / base['call']['median_us']:.2f}" if base else "-",
        )
    table.print()


def print_stages(load: str, name: str, stages: dict[str, list[float]]) -> None:
    table = Table(f"\n{name}, {load}: us of each kernel on each rank", ["rank", *stages])
    for rank, us in enumerate(zip(*stages.values(), strict=True)):
        table.add(str(rank), *(f"{value:.1f}" for value in us))
    table.add("most/least", *(f"{max(us) / min(us):.2f}" if min(us) > 0 else "-" for us in stages.values()))
    table.print()


def main() -> int:
    options = parse()
    if options.backend == "cuda":
        require_gpus(options.ranks)
    notes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="tracekern-benchmark-") as temporary:
        directory = Path(temporary)
        failed = launch(options, "ours", directory)
        if not options.no_peers and options.backend == "cuda":
            for peer in ("vdev_2d",):
                if why := launch(options, peer, directory, PEER_LIMIT_S):
                    notes[peer] = why
        measured = collect(directory, options.ranks)
        about = json.loads((directory / "about.json").read_text()) if (directory / "about.json").exists() else {}
    notes.update(about.pop("notes", {}))
    results = []
    for load, counts in loads(options).items():
        of_load = {name: ranks for (its_load, name), ranks in measured.items() if its_load == load}
        rows = {name: summarise(ranks) for name, ranks in of_load.items()}
        stages = {name: found for name, ranks in of_load.items() if (found := by_stage(ranks))}
        bytes_of = about.get("traffic", {}).get(load)
        if not rows or bytes_of is None:
            continue
        for row in rows.values():
            add_rates(row, bytes_of)
        print(f"\ntokens of the ranks: {counts}")
        print_load(load, bytes_of, rows)
        for name, found in () if options.sweep else stages.items():
            print_stages(load, name, found)
        results.append({"load": load, "tokens": counts, **bytes_of, "rows": rows, "stages_us": stages})
    for name, why in {**notes, **({"ours": failed} if failed else {})}.items():
        print(f"{name}: {why}")
    for load, skew in about.get("entry_skew_ns", {}).items():
        print(f"entry skew, {load}: median {skew['median']:.0f} ns, most {skew['max']} ns of {skew['calls']} calls")
    if options.backend == "cpu":
        print("CPU backend: order and coverage, never GPU durations")
    if results:
        shape = {key: value for key, value in vars(options).items() if key != "name"}
        num_gpus = options.ranks if options.backend == "cuda" else 0
        write_results(options.name, {"options": shape, **about, "notes": notes, "loads": results}, num_gpus)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
