"""What tracing costs the kernels of each family: device time of a call, untraced and traced in turns.

    python benchmarks/overhead.py low_latency [--ranks 1] [--tokens 1 8 32 64 128] [--calls 400]
    python benchmarks/overhead.py balanced pipelined --how device last host nothing
    python benchmarks/overhead.py two_hop --ranks 8 --nodes 2 --resident --sms 16
    python benchmarks/overhead.py int4 --tokens 64

Hidden 7168, top-8 of 256 experts, or of 64 where ranks are resident; fp8 dispatch in low_latency. Tokens are of each
rank, of int4 of each expert. Events of CUDA tick in 0.2 us and more, so a figure is the mean of several hundred pairs
without the tenth at either end, with its interval of 95 %; "on/off" is the ratio of the means, "added" their
difference. Of each call the slowest rank counts. "GB/s" is of what leaves a rank for others, rows alone.

--how: "device" keeps records in device memory, "peers" those without waits for warps of the own block, "host" keeps
them in host memory, "last" is the flight recorder, "nothing" runs traced kernels that select nothing. Exits with 1
where a traced launch ran unrecorded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import require_gpus, write_results
from pairs import SLEEP_CYCLES, Stopwatch, exit_code, measure_pairs, print_pairs, summarise
from ranks import placement, print_row, run_ranks, this_rank

HIDDEN, TOPK = 7168, 8
WAYS: dict[str, dict[str, Any]] = {
    "device": {"sink": "device"},
    "peers": {"sink": "device", "detail": "peers"},
    "host": {"sink": "host"},
    "last": {"keep": "last"},
    "nothing": {"sink": "device", "roles": ()},
}
"""--how -> options of the capture."""
GOALS = {
    "low_latency": {"dispatch": (1.05, 1.035), "combine": (1.06, 1.05)},
    "int4": {"k2": (1.05, 1.02), "k4": (1.05, 1.02)},
}
GOAL = 1.03, 1.02
"""Goals for on/off in device memory with all events and without waits for warps of the own block: GOALS for these
kernels, GOAL for any other."""


@dataclass(frozen=True)
class Case:
    """Calls that are measured: kernels, and the device time of each of a call that is recorded or, without a session,
    not."""

    about: dict[str, Any]
    kernels: tuple[str, ...]
    timed_us: Callable[[Any], list[float]]
    device: Any = "cuda"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", choices=sorted(FAMILIES), metavar="FAMILY", help=", ".join(FAMILIES))
    for name, usual, text in (("ranks", 1, "on a GPU each"), ("nodes", 1, "of two_hop"), ("calls", 400, "pairs")):
        parser.add_argument(f"--{name}", type=int, default=usual, help=text)
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--sms", type=int, nargs="+", default=[20], help="blocks of a kernel of two_hop")
    parser.add_argument("--experts", type=int, help="of all ranks together")
    parser.add_argument("--dispatch-dtype", choices=["fp8", "bf16"], default="fp8", help="of low_latency")
    parser.add_argument("--how", nargs="+", choices=sorted(WAYS), default=["device"])
    parser.add_argument("--resident", action="store_true", help="all ranks in one process, side by side on one GPU")
    parser.add_argument("--name", help="of the results, else overhead_RANKS")
    options = parser.parse_args()
    options.experts = options.experts or (64 if options.resident else 256)
    require_gpus(1 if options.resident else options.ranks)
    samples = run_ranks(f"{Path(__file__).stem}:measure", options)
    rows = [with_goal(summarise(of_all)) for of_all in zip(*samples, strict=True)]
    columns = ("family", "tokens", *(("sms", "GB/s") if "two_hop" in options.families else ()), "how", "kernel")
    print_pairs(f"{options.ranks} ranks, {placement(options)}, {options.experts} experts", columns, rows)
    about = {name: value for name, value in vars(options).items() if name not in ("families", "name", "resident")}
    about |= {"hidden": HIDDEN, "topk": TOPK, "placement": placement(options)}
    write_results(
        options.name or f"overhead_{options.ranks}", {**about, "rows": rows}, 1 if options.resident else options.ranks
    )
    return exit_code("overhead", rows)


def with_goal(row: dict[str, Any]) -> dict[str, Any]:
    if "bytes" in row:
        row["GB/s"] = round(row["bytes"] / row["off_us"] / 1e3)
    if row["how"] in ("device", "peers"):
        goals = GOALS.get(row["family"], {}).get(row["kernel"].split()[0], GOAL)
        row["goal"] = goals[row["how"] == "peers"]
    return row


def measure() -> None:
    """One rank: prints a row for each family, number of tokens, way and kernel."""
    with this_rank() as (options, group):
        for family in options.families:
            for case in FAMILIES[family](options, group, family):
                for how in options.how:
                    way = {"device": case.device, **WAYS[how]}
                    for row in measure_pairs(group, way, case.timed_us, case.kernels, options.calls):
                        print_row(group.rank, {"family": family, "how": how, **case.about, **row})


def sleep_cycles(options: argparse.Namespace, launches: int) -> int:
    """One process queues the kernels of all resident ranks."""
    return SLEEP_CYCLES * (launches * options.ranks if options.resident else 1)


def draw(options: argparse.Namespace, group: Any, tokens: int, experts: int) -> Any:
    from tracekern.moe.routing import draw_batch
    from tracekern.moe.shape import MoeShape

    shape = MoeShape(options.ranks, tokens, experts, TOPK, HIDDEN, "bf16")
    return draw_batch(shape, seed=1, rank=group.rank, iteration=0, routing="uniform", uneven=False).to("cuda")


def low_latency(options: argparse.Namespace, group: Any, _: str) -> Iterator[Case]:
    import torch

    from tracekern.moe.experts import draw_experts
    from tracekern.moe.low_latency import Buffer
    from tracekern.moe.shape import MoeShape

    all_tokens = options.tokens or [1, 8, 32, 64, 128]
    most, num_experts, use_fp8 = max(all_tokens), options.experts, options.dispatch_dtype == "fp8"
    num_bytes = Buffer.get_low_latency_rdma_size_hint(most, HIDDEN, options.ranks, num_experts)
    buffer = Buffer(group, num_rdma_bytes=num_bytes)
    rows = torch.empty((num_experts // options.ranks, options.ranks * most, HIDDEN), dtype=torch.bfloat16).to("cuda")
    for tokens in all_tokens:
        shape = MoeShape(options.ranks, tokens, num_experts, TOPK, HIDDEN, "bf16")
        batch, experts = draw(options, group, tokens, num_experts), draw_experts(shape).to("cuda")
        out = torch.empty_like(batch.x)

        def timed_us(session: Any, batch: Any = batch, experts: Any = experts, out: Any = out) -> list[float]:
            watch = Stopwatch(buffer.comm, sleep_cycles(options, 6))
            watch.mark()
            sent = buffer.low_latency_dispatch(
                batch.x, batch.topk_idx, most, num_experts, use_fp8=use_fp8, capture=session
            )
            watch.mark()
            buffer.apply_experts(sent[2], experts, rows)
            watch.mark()
            buffer.low_latency_combine(rows, batch.topk_idx, batch.topk_weights, sent[2], out=out, capture=session)
            watch.mark()
            buffer.synchronize()
            return [watch.between_us(first) for first in (0, 2)]

        yield Case({"tokens": tokens}, ("dispatch", "combine"), timed_us, buffer.comm.device)


def pipeline(options: argparse.Namespace, group: Any, variant: str) -> Iterator[Case]:
    import torch

    from tracekern.moe.experts import draw_experts
    from tracekern.moe.p2p.pipeline import P2PPipeline
    from tracekern.moe.shape import MoeShape

    all_tokens = options.tokens or [1, 16, 64, 256, 1024]
    shape = MoeShape(options.ranks, max(all_tokens), options.experts, TOPK, HIDDEN, "bf16")
    num_blocks = 128 // (options.ranks if options.resident else 1)
    exchange = P2PPipeline(group, shape, variant, backend="cuda", num_blocks=num_blocks, warps_per_block=16)
    experts = draw_experts(shape).to("cuda")
    for tokens in all_tokens:
        batch = draw(options, group, tokens, options.experts)
        out = torch.empty_like(batch.x)

        def timed_us(session: Any, batch: Any = batch, out: Any = out) -> list[float]:
            watch = Stopwatch(exchange.comm, sleep_cycles(options, 1))
            watch.mark()
            exchange(batch.x, batch.topk_idx, batch.topk_weights, experts, out=out, capture=session)
            watch.mark()
            exchange.synchronize()
            return [watch.between_us(0)]

        yield Case({"tokens": tokens}, ("call",), timed_us, exchange.comm.device)


def two_hop(options: argparse.Namespace, group: Any, _: str) -> Iterator[Case]:
    from dataclasses import replace

    from tracekern.moe.two_hop import Buffer

    for tokens in options.tokens or [4096]:
        for sms in options.sms:
            config = replace(Buffer.get_dispatch_config(options.ranks), num_sms=sms)
            size = 2 * HIDDEN, options.ranks, options.nodes
            nvl, rdma = config.get_nvl_buffer_size_hint(*size), config.get_rdma_buffer_size_hint(*size)
            buffer = Buffer(group, nvl, rdma, num_nodes=options.nodes, num_max_tokens_per_rank=tokens)
            batch = draw(options, group, tokens, options.experts)
            topk_idx = batch.topk_idx.long()
            layout = buffer.get_dispatch_layout(topk_idx, options.experts)
            choices = topk_idx, batch.topk_weights
            first = buffer.dispatch(batch.x, None, layout[0], layout[1], layout[3], layout[2], *choices, config=config)
            rows, handle = first[0], first[4]
            buffer.synchronize()

            def timed_us(session: Any, own: tuple[Any, ...] = (buffer, batch.x, rows, handle, config)) -> list[float]:
                """Each kernel with the one before it by which ranks learn that all have ended the last call."""
                buffer, x, rows, handle, config = own
                watch = Stopwatch(buffer.comm, sleep_cycles(options, 6))
                watch.mark()
                buffer.dispatch(x, handle, config=config, capture=session)
                watch.mark()
                buffer.combine(rows, handle, config=config, capture=session)
                watch.mark()
                buffer.synchronize()
                return [watch.between_us(first) for first in (0, 1)]

            about = {"tokens": tokens, "sms": sms, "bytes": rows_out(buffer, handle) * 2 * HIDDEN}
            yield Case(about, ("dispatch", "combine"), timed_us, buffer.comm.device)
            buffer.destroy()


def rows_out(buffer: Any, handle: Any) -> int:
    """Returns how many rows leave this rank in a dispatch: for other nodes, and for the other peers of its own."""
    node, peer = divmod(buffer.rank, buffer.nodes.peers)
    to_nodes = (handle.send_rdma_head >= 0).sum(0)  # of one node: what stays there
    to_peers = (handle.send_nvl_head >= 0).sum(0)
    return int(to_nodes.sum() - to_nodes[node] + to_peers.sum() - to_peers[peer])


def int4(options: argparse.Namespace, group: Any, _: str) -> Iterator[Case]:
    """Products of int4 experts, of which 48 fit a GPU's caches least of all."""
    import int4_load
    from int4_read import timed_us

    for tokens in options.tokens or [8, 64]:
        load = int4_load.Load.of(str(tokens), INT4_EXPERTS)
        for kernel in int4_load.KERNELS:
            weights = int4_load.Weights(kernel, INT4_EXPERTS, INT4_STAGINGS)
            for staging, product in int4_load.Case(weights, load).products.items():

                def measured(session: Any, product: Any = product) -> list[float]:
                    return [timed_us(lambda: product.start(session))]

                if staging in INT4_STAGINGS:
                    yield Case({"tokens": tokens}, (f"{kernel} {staging}",), measured)


INT4_EXPERTS, INT4_STAGINGS = 48, ["wide", "ring"]
FAMILIES: dict[str, Callable[[argparse.Namespace, Any, str], Iterator[Case]]] = {
    "low_latency": low_latency,
    "balanced": pipeline,
    "pipelined": pipeline,
    "two_hop": two_hop,
    "int4": int4,
}

if __name__ == "__main__":
    sys.exit(main())
