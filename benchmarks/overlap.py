"""Calls with int4 experts of `overlapped`, by partitions and blocks of the exchange, beside those of `reduce`.

    python benchmarks/overlap.py [--ranks 2] [--tokens 512 1024 2048 4096] [--partitions 2 3] [--blocks 0 4 8 16]
    python benchmarks/overlap.py --ranks 2 --resident          # on one GPU, side by side

Device time of a whole call, from a barrier of all ranks on the device to the last kernel's end: CUDA events, of each
call the slowest rank, medians of calls in turns. Hidden 7168, intermediate 2048, top-8 of 64 experts a rank unless
--experts says otherwise. Loads: "even", every expert is chosen equally often, and "drawn", experts are drawn for each
token. 0 blocks: as many as `overlapped` chooses. All results must have the bits of `reduce`, whose dispatch, experts
and combine are timed in calls of their own: no overlap can save more than the exchange takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, require_gpus, write_results
from pairs import SLEEP_CYCLES, Stopwatch
from ranks import Row, placement, print_row, run_ranks, this_rank

HIDDEN, INTERMEDIATE, TOPK = 7168, 2048, 8
WARM_UP = 3
PARTS = ("dispatch", "experts", "combine")


@dataclass(frozen=True)
class Plan:
    variant: str
    partitions: int
    blocks: int

    @property
    def options(self) -> dict[str, int]:
        if self.variant == "reduce":
            return {}
        return {"partitions": self.partitions, "exchange_blocks": self.blocks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="of each rank")
    parser.add_argument("--loads", nargs="+", default=["even", "drawn"], choices=["even", "drawn"])
    parser.add_argument("--partitions", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 4, 8, 16], help="of the exchange beside experts")
    parser.add_argument("--experts", type=int, help="of all ranks together; 64 for each unless said otherwise")
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each")
    parser.add_argument("--resident", action="store_true", help="all ranks in one process, side by side on one GPU")
    options = parser.parse_args()
    require_gpus(1 if options.resident else options.ranks)
    options.experts = options.experts or 64 * options.ranks
    samples = run_ranks(f"{Path(__file__).stem}:measure", options)
    rows = [summarise(of_all) for of_all in zip(*samples, strict=True)]
    print_tables(options, rows)
    about = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "topk": TOPK, "experts": options.experts}
    about |= {"ranks": options.ranks, "placement": placement(options), "calls": options.calls}
    name = f"overlap_{options.ranks}" + ("_resident" if options.resident else "")
    write_results(name, {**about, "rows": rows}, 1 if options.resident else options.ranks)
    return 0


def measure() -> None:
    """One rank: prints a row for each number of tokens and plan."""
    with this_rank() as (options, group):
        experts = draw_experts(options.experts)
        for tokens in options.tokens:
            for load in options.loads:
                measure_load(options, group, experts, tokens, load)


def draw_experts(num_experts: int) -> Any:
    import torch

    from tracekern.moe.gemm import prepare_weights
    from tracekern.moe.gemm.experts import Int4Experts

    generator = torch.Generator("cuda").manual_seed(1)

    def draw(channels: int, rows: int) -> Any:
        size = (num_experts, channels // 64, rows, 2)
        words = torch.randint(0, 1 << 48, size, generator=generator, device="cuda")
        return prepare_weights(words.bitwise_or_(0x3C00 << 48))  # all with the scale 1/128

    return Int4Experts.of(draw(HIDDEN, 2 * INTERMEDIATE), draw(INTERMEDIATE, HIDDEN))


def measure_load(options: argparse.Namespace, group: Any, experts: Any, tokens: int, load: str) -> None:
    import torch

    from tracekern.moe.p2p.pipeline import P2PPipeline
    from tracekern.moe.shape import MoeShape

    shape = MoeShape(options.ranks, tokens, options.experts, TOPK, HIDDEN, "bf16")
    batch = draw(shape, group.rank, load)
    plans = [Plan("reduce", 1, 0)]
    plans += [
        Plan("overlapped", number, blocks) for number in options.partitions if number > 1 for blocks in options.blocks
    ]
    pipelines = [P2PPipeline(group, shape, plan.variant, backend="cuda", **plan.options) for plan in plans]
    sleep_cycles = SLEEP_CYCLES * (4 * options.ranks if options.resident else 2)
    outs = [torch.empty_like(batch[0]) for _ in plans]
    times: list[list[float]] = [[] for _ in plans]
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for call in range(WARM_UP + options.calls):
        for pipeline, out, us in zip(pipelines, outs, times, strict=True):
            us.append(timed_us(pipeline, batch, experts, out, sleep_cycles))
        if call >= WARM_UP:
            for part, us_of_part in zip(
                PARTS, timed_parts(pipelines[0], batch, experts, outs[0], sleep_cycles), strict=True
            ):
                parts[part].append(us_of_part)
    for plan, pipeline, out, us in zip(plans, pipelines, outs, times, strict=True):
        if not torch.equal(out.view(torch.int16), outs[0].view(torch.int16)):
            raise RuntimeError(f"rank {group.rank}: {plan} with {tokens} tokens: not the bits of reduce")
        about = {
            "tokens": tokens,
            "load": load,
            "rows_each": options.ranks * tokens * TOPK / options.experts,
            **vars(plan),
            "blocks": pipeline.options.get("exchange_blocks", 0),
        }
        print_row(group.rank, {**about, "us": us[WARM_UP:], "parts": parts if plan.variant == "reduce" else {}})


def draw(shape: Any, rank: int, load: str) -> tuple[Any, Any, Any]:
    """Tokens, their experts, and the weights of these."""
    import torch

    generator = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn((shape.max_tokens, shape.hidden), generator=generator, device="cuda").bfloat16()
    flat = torch.arange(shape.max_tokens * shape.topk, device="cuda").view(shape.max_tokens, shape.topk)
    turned = torch.randperm(shape.num_experts, generator=generator, device="cuda")
    weights = torch.rand((shape.max_tokens, shape.topk), generator=generator, device="cuda")
    if load == "even":
        return x, turned[flat % shape.num_experts].int(), weights
    ranked = torch.rand((shape.max_tokens, shape.num_experts), generator=generator, device="cuda")
    return x, ranked.topk(shape.topk).indices.int().contiguous(), weights


def timed_us(pipeline: Any, batch: Any, experts: Any, out: Any, sleep_cycles: int) -> float:
    watch = Stopwatch(pipeline.comm, sleep_cycles)
    watch.mark()
    pipeline(*batch, experts, out=out)
    watch.mark()
    pipeline.synchronize()
    return watch.between_us(0)


def timed_parts(pipeline: Any, batch: Any, experts: Any, out: Any, sleep_cycles: int) -> list[float]:
    """Returns how long dispatch, the experts and combine of `reduce` take."""
    watch = Stopwatch(pipeline.comm, sleep_cycles)
    watch.mark()
    pipeline(
        *batch,
        experts,
        out=out,
        after_stage=lambda stage: watch.mark() if stage in ("dispatch", "k4", "combine") else None,
    )
    pipeline.synchronize()
    return [watch.between_us(first) for first in range(len(PARTS))]


def summarise(ranks: tuple[Row, ...]) -> Row:
    """One row of all ranks: the slowest rank of each call."""

    def slowest(times: list[list[float]]) -> list[float]:
        return sorted(max(of_call) for of_call in zip(*times, strict=True))

    row = {name: value for name, value in ranks[0].items() if name not in ("rank", "us", "parts")}
    times = slowest([rank["us"] for rank in ranks])
    tenth = len(times) // 10
    row |= {"us": statistics.median(times), "us_p10": times[tenth], "us_p90": times[-1 - tenth]}
    return row | {
        "parts": {
            part: statistics.median(slowest([rank["parts"][part] for rank in ranks])) for part in ranks[0]["parts"]
        }
    }


def print_tables(options: argparse.Namespace, rows: list[Row]) -> None:
    title = f"{options.ranks} ranks, {placement(options)}, {options.experts} int4 experts"
    table = Table(title, ["tokens", "load", "rows of an expert", "call", "us", "p10..p90", "of reduce"])
    for row in rows:
        alike = [other for other in rows if (other["tokens"], other["load"]) == (row["tokens"], row["load"])]
        reduce = next(other for other in alike if other["variant"] == "reduce")
        told = "reduce" if row is reduce else f"{row['partitions']} partitions, {row['blocks']} blocks"
        spread = f"{row['us_p10']:.0f}..{row['us_p90']:.0f}"
        table.add(
            str(row["tokens"]),
            row["load"],
            f"{row['rows_each']:.0f}",
            told,
            f"{row['us']:.0f}",
            spread,
            f"{row['us'] / reduce['us']:.3f}",
        )
    table.print()
    parts = Table("parts of reduce, us", ["tokens", "load", *PARTS])
    for row in rows:
        if row["parts"]:
            parts.add(str(row["tokens"]), row["load"], *(f"{row['parts'][part]:.0f}" for part in PARTS))
    parts.print()


if __name__ == "__main__":
    sys.exit(main())
