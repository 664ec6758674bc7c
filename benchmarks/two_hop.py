"""Device time of two-hop dispatch and combine on GPUs, untraced and traced in turns; tokens go where a handle says.

    python benchmarks/two_hop.py [--ranks 4] [--nodes 1] [--tokens 4096] [--sms 20 96 128] [--calls 20]
    python benchmarks/two_hop.py --ranks 8 --nodes 2 --resident --sms 16

bf16, hidden 7168, top-8 of 256 experts. The ranks are split into nodes, in their order, whatever links they have.
"GB/s" is of what leaves a rank for others, rows alone. How times are taken: benchmarks/pairs.py.
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
from ranks import Row, placement, print_row, run_ranks, this_rank

HIDDEN, TOPK, EXPERTS = 7168, 8, 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("ranks", 4), ("nodes", 1), ("tokens", 4096), ("calls", 20)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--sms", type=int, nargs="+", default=[20, 96, 128], help="blocks of a kernel")
    parser.add_argument("--chunk", type=int, help="tokens that are told of at a time within a node; else DeepEP's")
    parser.add_argument("--slots", type=int, help="of a ring within a node; else DeepEP's")
    parser.add_argument("--resident", action="store_true", help="all ranks in one process, side by side on one GPU")
    options = parser.parse_args()
    require_gpus(1 if options.resident else options.ranks)
    samples = run_ranks(f"{Path(__file__).stem}:measure", options)
    rows = [with_rate(summarise(of_all)) for of_all in zip(*samples, strict=True)]
    about = f"{options.ranks} ranks on {options.nodes} nodes, {placement(options)}, {options.tokens} tokens each"
    print_pairs(f"two hops, {about}", ("sms", "kernel", "GB/s"), rows)
    name = f"two_hop_{options.ranks}_ranks_{options.nodes}_nodes" + ("_resident" if options.resident else "")
    facts = {"hidden": HIDDEN, "topk": TOPK, "experts": EXPERTS, "ranks": options.ranks, "nodes": options.nodes}
    facts |= {"tokens": options.tokens, "placement": placement(options), "rows": rows}
    facts |= {"chunk": options.chunk, "slots": options.slots}
    write_results(name, facts, 1 if options.resident else options.ranks)
    return exit_code("two_hop", rows)


def with_rate(row: Row) -> Row:
    return row | {"GB/s": round(row["bytes"] / row["off_us"] / 1e3)}


def measure() -> None:
    """One rank: prints a row for each number of blocks and kernel."""
    with this_rank() as (options, group):
        for sms in options.sms:
            measure_rank(options, group, sms)


def measure_rank(options: argparse.Namespace, group: Any, sms: int) -> None:
    from dataclasses import replace

    from tracekern.moe.routing import draw_batch
    from tracekern.moe.shape import MoeShape
    from tracekern.moe.two_hop import Buffer

    config = replace(Buffer.get_dispatch_config(options.ranks), num_sms=sms)
    config = replace(
        config,
        num_max_nvl_chunked_send_tokens=options.chunk or config.num_max_nvl_chunked_send_tokens,
        num_max_nvl_chunked_recv_tokens=options.slots or config.num_max_nvl_chunked_recv_tokens,
    )
    size = 2 * HIDDEN, options.ranks, options.nodes
    nvl, rdma = config.get_nvl_buffer_size_hint(*size), config.get_rdma_buffer_size_hint(*size)
    buffer = Buffer(group, nvl, rdma, num_nodes=options.nodes, num_max_tokens_per_rank=options.tokens)
    shape = MoeShape(options.ranks, options.tokens, EXPERTS, TOPK, HIDDEN, "bf16")
    batch = draw_batch(shape, seed=1, rank=group.rank, iteration=0, routing="uniform", uneven=False).to("cuda")
    calls = Calls(buffer, batch, config, options)
    for row in measure_pairs(group, buffer.comm.device, calls.timed_us, ("dispatch", "combine"), options.calls):
        print_row(group.rank, {"sms": sms, "bytes": calls.bytes_out, **row})
    buffer.destroy()


def rows_out(buffer: Any, handle: Any) -> int:
    """Returns how many rows leave this rank in a dispatch: for other nodes, and for the other peers of its own."""
    node, peer = divmod(buffer.rank, buffer.nodes.peers)
    to_nodes = (handle.send_rdma_head >= 0).sum(0)  # of one node: what stays there
    to_peers = (handle.send_nvl_head >= 0).sum(0)
    return int(to_nodes.sum() - to_nodes[node] + to_peers.sum() - to_peers[peer])


class Calls:
    """The calls of one rank with a handle."""

    def __init__(self, buffer: Any, batch: Any, config: Any, options: argparse.Namespace) -> None:
        self.buffer, self.x, self.config = buffer, batch.x, config
        topk_idx = batch.topk_idx.long()
        layout = buffer.get_dispatch_layout(topk_idx, EXPERTS)
        choices = topk_idx, batch.topk_weights
        first = buffer.dispatch(batch.x, None, layout[0], layout[1], layout[3], layout[2], *choices, config=config)
        self.rows, self.handle = first[0], first[4]
        buffer.synchronize()
        self.bytes_out = rows_out(buffer, self.handle) * 2 * HIDDEN
        self.sleep_cycles = SLEEP_CYCLES * (6 * options.ranks if options.resident else 1)

    def timed_us(self, session: Any) -> list[float]:
        """Device time of each kernel, with the one before it by which ranks learn that all have ended the last call."""
        buffer = self.buffer
        watch = Stopwatch(buffer.comm, self.sleep_cycles)
        watch.mark()
        buffer.dispatch(self.x, self.handle, config=self.config, capture=session)
        watch.mark()
        buffer.combine(self.rows, self.handle, config=self.config, capture=session)
        watch.mark()
        buffer.synchronize()
        return [watch.between_us(first) for first in (0, 1)]


if __name__ == "__main__":
    sys.exit(main())
