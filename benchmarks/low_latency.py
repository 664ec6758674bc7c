"""Device time of low latency dispatch and combine on GPUs, untraced and traced in turns: what tracing costs a kernel.

    python benchmarks/low_latency.py [--ranks 1] [--tokens 1 8 32 64 128] [--calls 60] [--dispatch-dtype bf16]
    python benchmarks/low_latency.py --ranks 8 --resident      # all of them side by side on one GPU

Dispatch in fp8 unless said otherwise, bf16 combine, hidden 7168, top-8 of 256 experts, or of 64 where ranks are
resident: --experts says others. How times are taken: benchmarks/pairs.py.
Exits with 1 where a traced launch ran unrecorded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import require_gpus, write_results
from pairs import SLEEP_CYCLES, Stopwatch, exit_code, measure_pairs, print_pairs, summarise
from ranks import placement, print_row, run_ranks, this_rank

HIDDEN, TOPK = 7168, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 128], help="of each rank")
    parser.add_argument("--calls", type=int, default=60, help="timed pairs")
    parser.add_argument("--experts", type=int, help="of all ranks together")
    parser.add_argument("--dispatch-dtype", choices=["fp8", "bf16"], default="fp8")
    parser.add_argument("--resident", action="store_true", help="all ranks in one process, side by side on one GPU")
    options = parser.parse_args()
    require_gpus(1 if options.resident else options.ranks)
    samples = run_ranks(f"{Path(__file__).stem}:measure", options)
    rows = [summarise(of_all) for of_all in zip(*samples, strict=True)]
    title = f"low latency on {options.ranks} ranks, {placement(options)}, {options.dispatch_dtype} dispatch"
    print_pairs(title, ("tokens", "kernel"), rows)
    about = {"hidden": HIDDEN, "topk": TOPK, "experts": num_experts(options), "ranks": options.ranks}
    about |= {"placement": placement(options), "dispatch_dtype": options.dispatch_dtype}
    name = f"low_latency_{options.ranks}" + ("_resident" if options.resident else "")
    name += f"_{options.experts}_experts" if options.experts else ""
    name += f"_{options.dispatch_dtype}" if options.dispatch_dtype != "fp8" else ""
    write_results(name, {**about, "rows": rows}, 1 if options.resident else options.ranks)
    return exit_code("low_latency", rows)


def num_experts(options: argparse.Namespace) -> int:
    return int(options.experts or (64 if options.resident else 256))


def measure() -> None:
    """One rank: prints a row for each number of tokens and kernel."""
    with this_rank() as (options, group):
        measure_rank(options, group)


def measure_rank(options: argparse.Namespace, group: Any) -> None:
    import torch

    from tracekern.moe.experts import draw_experts
    from tracekern.moe.low_latency import Buffer
    from tracekern.moe.routing import draw_batch
    from tracekern.moe.shape import MoeShape

    experts, most = num_experts(options), max(options.tokens)
    num_bytes = Buffer.get_low_latency_rdma_size_hint(most, HIDDEN, options.ranks, experts)
    buffer = Buffer(group, num_rdma_bytes=num_bytes)
    size = (experts // options.ranks, options.ranks * most, HIDDEN)
    rows = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    for tokens in options.tokens:
        shape = MoeShape(options.ranks, tokens, experts, TOPK, HIDDEN, "bf16")
        drawn = draw_batch(shape, seed=1, rank=group.rank, iteration=0, routing="uniform", uneven=False)
        calls = Calls(buffer, drawn.to("cuda"), most, draw_experts(shape).to("cuda"), rows, options)
        for row in measure_pairs(
            group, buffer.comm.device, calls.timed_us, (f"{options.dispatch_dtype} dispatch", "combine"), options.calls
        ):
            print_row(group.rank, {"tokens": tokens, **row})


class Calls:
    """The calls of one rank with as many tokens each."""

    def __init__(
        self, buffer: Any, batch: Any, most: int, experts: Any, rows: Any, options: argparse.Namespace
    ) -> None:
        import torch

        self.buffer, self.batch, self.most, self.experts, self.rows = buffer, batch, most, experts, rows
        self.num_experts = num_experts(options)
        self.use_fp8 = options.dispatch_dtype == "fp8"
        # One process queues the kernels of all resident ranks, each in three launches.
        self.sleep_cycles = SLEEP_CYCLES * (6 * options.ranks if options.resident else 1)
        self.out = torch.empty_like(batch.x)

    def timed_us(self, session: Any) -> list[float]:
        """Device time of each kernel."""
        buffer, batch = self.buffer, self.batch
        watch = Stopwatch(buffer.comm, self.sleep_cycles)
        watch.mark()
        dispatched = buffer.low_latency_dispatch(
            batch.x, batch.topk_idx, self.most, self.num_experts, use_fp8=self.use_fp8, capture=session
        )
        watch.mark()
        buffer.apply_experts(dispatched[2], self.experts, self.rows)
        watch.mark()
        buffer.low_latency_combine(
            self.rows, batch.topk_idx, batch.topk_weights, dispatched[2], out=self.out, capture=session
        )
        watch.mark()
        buffer.synchronize()
        return [watch.between_us(first) for first in (0, 2)]


if __name__ == "__main__":
    sys.exit(main())
