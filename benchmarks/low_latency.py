"""Device time of low latency dispatch and combine on GPUs, untraced and traced in turns: what tracing costs a kernel.

    python benchmarks/low_latency.py [--ranks 1] [--tokens 1 8 32 64 128] [--calls 60]
    python benchmarks/low_latency.py --ranks 8 --resident      # all of them side by side on one GPU

fp8 dispatch, bf16 combine, hidden 7168, top-8 of 256 experts, or of 64 where ranks are resident: --experts says others.
Calls are queued behind a sleeping GPU and a barrier of all ranks on the device. CUDA events stand before and behind
each kernel; of each call the slowest rank counts. Untraced and traced go in pairs, the untraced one first. "on/off" is
the ratio of the medians.
Exits with 1 where a traced launch ran unrecorded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, require_gpus, write_results
from overhead_pipeline import SLEEP_CYCLES
from ranks import Row, directory_of_all, placement, print_row, run_ranks, this_rank

HIDDEN, TOPK = 7168, 8
KERNELS = ("dispatch", "combine")
WARM_UP = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 128], help="of each rank")
    parser.add_argument("--calls", type=int, default=60, help="timed pairs")
    parser.add_argument("--experts", type=int, help="of all ranks together")
    parser.add_argument("--resident", action="store_true", help="all ranks in one process, side by side on one GPU")
    options = parser.parse_args()
    require_gpus(1 if options.resident else options.ranks)
    samples = run_ranks(f"{Path(__file__).stem}:measure", options)
    rows = [summarise(of_all) for of_all in zip(*samples, strict=True)]
    print_table(options, rows)
    about = {"hidden": HIDDEN, "topk": TOPK, "experts": num_experts(options), "ranks": options.ranks}
    name = f"low_latency_{options.ranks}" + ("_resident" if options.resident else "")
    name += f"_{options.experts}_experts" if options.experts else ""
    write_results(
        name, {**about, "placement": placement(options), "rows": rows}, 1 if options.resident else options.ranks
    )
    unrecorded = sum(row["unrecorded"] for row in rows)
    if unrecorded:
        print(f"low_latency: {unrecorded} traced launches found no room and ran unrecorded: not a measurement")
    return 1 if unrecorded else 0


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
        for row in calls.measure():
            print_row(group.rank, {"tokens": tokens, **row})


class Calls:
    """The calls of one rank with as many tokens each."""

    def __init__(
        self, buffer: Any, batch: Any, most: int, experts: Any, rows: Any, options: argparse.Namespace
    ) -> None:
        import torch

        self.buffer, self.batch, self.most, self.experts, self.rows = buffer, batch, most, experts, rows
        self.num_calls = options.calls
        self.num_experts = num_experts(options)
        # One process queues the kernels of all resident ranks, each in three launches.
        self.sleep_cycles = SLEEP_CYCLES * (6 * options.ranks if options.resident else 1)
        self.out = torch.empty_like(batch.x)

    def timed_us(self, session: Any) -> list[float]:
        """Device time of each kernel."""
        import torch

        buffer, batch = self.buffer, self.batch
        buffer.comm.barrier()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda._sleep(self.sleep_cycles)
        buffer.comm.native.barrier(stream=torch.cuda.current_stream().cuda_stream)
        events[0].record()
        dispatched = buffer.low_latency_dispatch(batch.x, batch.topk_idx, self.most, self.num_experts, capture=session)
        events[1].record()
        buffer.apply_experts(dispatched[2], self.experts, self.rows)
        events[2].record()
        buffer.low_latency_combine(
            self.rows, batch.topk_idx, batch.topk_weights, dispatched[2], out=self.out, capture=session
        )
        events[3].record()
        buffer.synchronize()
        return [events[i].elapsed_time(events[i + 1]) * 1e3 for i in (0, 2)]

    def measure(self) -> list[Row]:
        """Pairs of untraced and traced calls under one capture."""
        from tracekern.record.session import capture

        device = self.buffer.comm.device
        how = {"device": device, "clocks": False, "sink": "device", "max_bytes": 1 << 29}
        with directory_of_all(self.buffer.group) as directory, capture(directory, **how) as session:
            with session.counting():
                self.timed_us(session)
            pairs = [(self.timed_us(None), self.timed_us(session)) for _ in range(WARM_UP + self.num_calls)][WARM_UP:]
            unrecorded = int(session.segment.header["launches_refused"])
        return [
            {
                "kernel": kernel,
                "off_us": [off[idx] for off, _ in pairs],
                "on_us": [on[idx] for _, on in pairs],
                "unrecorded": unrecorded,
            }
            for idx, kernel in enumerate(KERNELS)
        ]


def summarise(ranks: tuple[Row, ...]) -> Row:
    """One row of all ranks: medians and spread of the slowest rank of each call."""
    row = {name: ranks[0][name] for name in ("tokens", "kernel")}
    for key in ("off_us", "on_us"):
        times = sorted(max(of_call) for of_call in zip(*(row[key] for row in ranks), strict=True))
        tenth = len(times) // 10
        row |= {key: statistics.median(times), f"{key}_p10": times[tenth], f"{key}_p90": times[-1 - tenth]}
    row["on_over_off"] = row["on_us"] / row["off_us"]
    row["unrecorded"] = sum(one["unrecorded"] for one in ranks)
    return row


def print_table(options: argparse.Namespace, rows: list[Row]) -> None:
    title = f"low latency on {options.ranks} ranks, {placement(options)}, device time of the slowest"
    table = Table(title, ["tokens", "kernel", "off us", "p10..p90", "on us", "p10..p90", "on/off"])
    for row in rows:
        cells = [str(row["tokens"]), row["kernel"]]
        for key in ("off_us", "on_us"):
            cells += [f"{row[key]:.1f}", f"{row[f'{key}_p10']:.1f}..{row[f'{key}_p90']:.1f}"]
        table.add(*cells, f"{row['on_over_off']:.3f}")
    table.print()


if __name__ == "__main__":
    sys.exit(main())
