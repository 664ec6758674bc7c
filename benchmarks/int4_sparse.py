"""Device time of K2 and K4 of int4 experts on one GPU: both ways of staging, untraced and traced in turns.

    python benchmarks/int4_sparse.py [--experts 48 128] [--tokens 1 2 4 8 16 32 64] [--calls 30]

Hidden 7168, intermediate 2048, as many tokens for each expert. CUDA events stand before and behind each kernel, on a
queue behind a sleeping GPU. "read" is how long torch's sum takes to read the same weights, "share" that over the
kernel's time: 100 % would be a kernel that does nothing but read. Untraced and traced go in pairs, the untraced one
first; "on/off" is the ratio of the medians. Exits with 1 where a kernel has a stack or spills, or where a traced launch
ran unrecorded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, require_gpus, write_results

HIDDEN, INTERMEDIATE = 7168, 2048
KERNELS = ("k2", "k4")
SLEEP_CYCLES = 2_000_000
WARM_UP = 3

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[48, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="of each expert")
    parser.add_argument("--calls", type=int, default=30, help="timed pairs")
    parser.add_argument("--detail", type=int, default=0, help="traced: record the steps of every so many-th tile")
    parser.add_argument("--clock", choices=("realtime", "cycles"), default="realtime", help="traced: of the records")
    options = parser.parse_args()
    require_gpus(1)
    rows = [row for experts in options.experts for row in measure(experts, options)]
    used = resources()
    print_table(rows)
    for row in used:
        print(f"  {row['kernel']} {row['staging']}: {row['registers']} registers, {row['local_bytes']} bytes of stack")
    about = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "resources": used, "rows": rows}
    write_results("int4_sparse", about, 1)
    spills = any(row["local_bytes"] for row in used)
    unrecorded = sum(row["unrecorded"] for row in rows)
    if unrecorded:
        print(f"int4_sparse: {unrecorded} traced launches found no room and ran unrecorded: not a measurement")
    return 1 if spills or unrecorded else 0


def resources() -> list[Row]:
    """What each kernel takes of an SM."""
    from tracekern import _cuda
    from tracekern.moe.gemm.kernels import STAGINGS

    rows = []
    for kernel in KERNELS:
        for staging in STAGINGS:
            registers, local_bytes = _cuda.families["gemm"].resources(kernel, staging)
            rows.append({"kernel": kernel, "staging": staging, "registers": registers, "local_bytes": local_bytes})
    return rows


def measure(experts: int, options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each kernel, number of tokens and staging."""
    from tracekern.moe.gemm.kernels import STAGINGS

    for kernel in KERNELS:
        weights = draw_weights(kernel, experts)
        read_us = statistics.median(timed_us(weights.sum) for _ in range(WARM_UP + options.calls))
        for tokens in options.tokens:
            for staging in STAGINGS:
                of_kernel = OneKernel(kernel, staging, weights, tokens)
                about = {"kernel": kernel, "experts": experts, "tokens": tokens, "staging": staging}
                yield {**about, "read_us": read_us, **of_kernel.measure(options)}


def draw_weights(kernel: str, experts: int) -> Any:
    """Words with every number and place, all with the scale 1/128."""
    import torch

    channels, rows = (HIDDEN, 2 * INTERMEDIATE) if kernel == "k2" else (INTERMEDIATE, HIDDEN)
    words = torch.randint(0, 1 << 48, (experts, channels // 64, rows, 2), device="cuda")
    return words.bitwise_or_(0x3C00 << 48)


def timed_us(start: Callable[[], object]) -> float:
    """Device time of what `start` queues."""
    import torch

    before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES)
    before.record()
    start()
    behind.record()
    behind.synchronize()
    return float(before.elapsed_time(behind) * 1e3)


class OneKernel:
    """K2 or K4 for the same number of tokens of each expert."""

    def __init__(self, kernel: str, staging: str, weights: Any, tokens: int) -> None:
        import torch

        from tracekern.moe.gemm.kernels import Sizes

        experts = int(weights.shape[0])
        offsets = torch.arange(0, experts * tokens + 1, tokens, dtype=torch.int32, device="cuda")
        make = {"dtype": torch.bfloat16, "device": "cuda"}
        self.kernel, self.staging = kernel, staging
        self.sizes = Sizes(num_experts=experts, num_listed=experts, hidden=HIDDEN, intermediate=INTERMEDIATE)
        self.tensors = {
            "w13": weights,
            "w2": weights,
            "expert_offset": offsets,
            "tile_end": torch.empty_like(offsets),
            "x_rows": torch.randn((experts * tokens, HIDDEN), **make),
            "middle_rows": torch.randn((experts * tokens, INTERMEDIATE), **make),
            "result_rows": torch.empty((experts * tokens, HIDDEN), **make),
        }
        self._launch("tiles", None)

    def _launch(self, stage: str, session: Any) -> None:
        from tracekern.moe.gemm.kernels import launch

        device = self.tensors["x_rows"].device
        launch((stage,), self.sizes, self.tensors, device=device, staging=self.staging, capture=session)

    def measure(self, options: argparse.Namespace) -> Row:
        """Pairs of untraced and traced launches under one capture."""
        from tracekern.record.session import capture

        how = {"device": "cuda", "clocks": False, "clock": options.clock, "sink": "device", "max_bytes": 1 << 30}
        self.sizes = replace(self.sizes, detail=options.detail)  # of launches that are on record
        with tempfile.TemporaryDirectory() as directory, capture(directory, **how) as session:
            with session.counting():
                timed_us(lambda: self._launch(self.kernel, session))
            pairs = []
            for _ in range(WARM_UP + options.calls):
                off_us = timed_us(lambda: self._launch(self.kernel, None))
                pairs.append((off_us, timed_us(lambda: self._launch(self.kernel, session))))
            unrecorded = int(session.segment.header["launches_refused"])
        row: Row = {"unrecorded": unrecorded}
        for key, times in zip(("off_us", "on_us"), zip(*pairs[WARM_UP:], strict=True), strict=True):
            ordered = sorted(times)
            tenth = len(ordered) // 10
            row |= {key: statistics.median(ordered), f"{key}_p10": ordered[tenth], f"{key}_p90": ordered[-1 - tenth]}
        row["on_over_off"] = row["on_us"] / row["off_us"]
        return row


def print_table(rows: list[Row]) -> None:
    title = f"int4 experts, hidden {HIDDEN}, intermediate {INTERMEDIATE}, device time"
    table = Table(title, ["experts", "tokens", "kernel", "staging", "off us", "p10..p90", "read us", "share", "on/off"])
    for row in sorted(rows, key=lambda row: (row["experts"], row["tokens"])):
        table.add(
            str(row["experts"]),
            str(row["tokens"]),
            row["kernel"],
            row["staging"],
            f"{row['off_us']:.1f}",
            f"{row['off_us_p10']:.1f}..{row['off_us_p90']:.1f}",
            f"{row['read_us']:.1f}",
            f"{100 * row['read_us'] / row['off_us']:.0f} %",
            f"{row['on_over_off']:.3f}",
        )
    table.print()


if __name__ == "__main__":
    sys.exit(main())
