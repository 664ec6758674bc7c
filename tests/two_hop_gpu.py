"""Functions that test_two_hop_gpu.py launches as resident ranks of one GPU. Each prints how much was wrong."""

from __future__ import annotations

import contextlib
import os
import sys

import torch
from two_hop_check import Case, bring, combine_wrong, combined_wanted, dispatch, num_wrong, rows_of, wanted
from two_hop_refusals import damaged_calls, is_as_wanted, spoilt_calls

import tracekern
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.launcher.resident import run_residents
from tracekern.moe.two_hop import Buffer, Config
from tracekern.moe.two_hop.reference import count_wrong

NUM_BATCHES = 10
CASES = (
    Case(Config(16, 2, 8, 4, 16), tokens=256, hidden=1024, experts_each=4, topk=6),
    Case(Config(16, 1, 1, 1, 7), tokens=64, hidden=512, experts_each=4, topk=6, is_fp8=True),
)
REPLAYS = 200


def make_buffer(group: Group, num_nodes: int, backend: str, case: Case) -> Buffer:
    config, hidden_bytes = case.config, 2 * case.hidden
    nvl = config.get_nvl_buffer_size_hint(hidden_bytes, group.num_ranks, num_nodes)
    rdma = config.get_rdma_buffer_size_hint(hidden_bytes, group.num_ranks, num_nodes)
    return Buffer(
        group,
        nvl,
        rdma,
        num_nodes=num_nodes,
        num_max_tokens_per_rank=case.tokens,
        backend=backend,
        timeout_s=60.0,
    )


def many_calls() -> int:
    """TWO_HOP: nodes, calls and backend. All calls of each case are compared."""
    group = Group.discover()
    nodes, calls, backend = os.environ["TWO_HOP"].split()
    wrong = 0
    for case in CASES:
        buffer = make_buffer(group, int(nodes), backend, case)
        device = buffer.comm.device.torch_device
        given = [bring(case, group.num_ranks, group.rank, seed) for seed in range(NUM_BATCHES)]
        brought, due = [one.to(device) for one in given], [combined_wanted(case, buffer.nodes, one) for one in given]
        expected = [wanted(case, buffer.nodes, group.rank, seed) for seed in range(NUM_BATCHES)]
        for call in range(int(calls) // len(CASES)):
            batch = call % NUM_BATCHES
            received = dispatch(buffer, case, brought[batch])
            buffer.synchronize()
            wrong += count_wrong(received, expected[batch])
            if call % 2:
                wrong += combine_wrong(buffer, received, due[batch])
        with _capture(buffer) if case is CASES[0] else contextlib.nullcontext() as session:
            if session is not None:
                wrong += num_wrong(buffer, case, 0, capture=session)
        group.barrier()
        buffer.destroy()
    sys.stdout.write(f"rank {group.rank}: {calls} calls, {wrong} wrong\n")
    group.barrier()
    return int(wrong > 0)


def _capture(buffer: Buffer) -> contextlib.AbstractContextManager[tracekern.Capture | None]:
    directory = os.environ.get("TWO_HOP_CAPTURE", "")
    if not directory:
        return contextlib.nullcontext()
    return tracekern.capture(directory, device=buffer.comm.device, records_per_track=4096)


def graph() -> int:
    """One rank replays a call with worst-case memory; without that a graph is refused."""
    group, case = Group.discover(), CASES[0]
    buffer = make_buffer(group, 1, "cuda", case)
    given, expected = bring(case, 1, 0, 0).to("cuda"), wanted(case, buffer.nodes, 0, 0)
    due = combined_wanted(case, buffer.nodes, bring(case, 1, 0, 0))[0]
    rows, wrong, captured = len(expected.recv_x), num_wrong(buffer, case, 0), torch.cuda.CUDAGraph()
    layout = buffer.get_dispatch_layout(given.topk_idx, case.experts_each)
    arguments = (given.x, None, layout[0], layout[1], layout[3], layout[2], given.topk_idx, given.topk_weights)
    buffer.dispatch(*arguments, num_worst_tokens=case.tokens, config=case.config)
    buffer.synchronize()
    with torch.cuda.graph(captured):
        recv_x, recv_idx, _, _, handle, _ = buffer.dispatch(
            *arguments, num_worst_tokens=case.tokens, config=case.config
        )
        combined = buffer.combine(rows_of(recv_x, 0), handle)[0]
        try:
            buffer.dispatch(*arguments, config=case.config)
            wrong += 1
        except BadInput as error:
            wrong += "give num_worst_tokens" not in str(error)
    for _ in range(REPLAYS):
        recv_x.fill_(torch.nan)
        captured.replay()
        buffer.synchronize()
        wrong += not torch.equal(recv_x[:rows].cpu(), expected.recv_x)
        wrong += not torch.equal(recv_idx[:rows].cpu(), expected.recv_topk_idx)
        wrong += not torch.equal(combined.cpu(), due)
    wrong += num_wrong(buffer, case, 1)  # eager calls go on where the replays left off
    sys.stdout.write(f"rank 0: {REPLAYS} calls, {wrong} wrong\n")
    return int(wrong > 0)


def refusals() -> int:
    """Ranks on one node and on two: what tests/moe/test_two_hop_refusals.py checks on the CPU."""
    group, wrong, told = Group.discover(), 0, dict[str, str]()
    for nodes in (1, 2):
        buffer = make_buffer(group, nodes, "cuda", CASES[0])
        for spoil in (spoilt_calls, damaged_calls):
            refused, wrong_after = spoil(buffer, CASES[0])
            told |= {name: text for name, text in refused.items() if not is_as_wanted(name, text)}
            wrong += wrong_after
        buffer.destroy()
    sys.stdout.write(f"rank {group.rank}: 2 calls, {wrong + len(told)} wrong; {told}\n")
    group.barrier()
    return int(wrong > 0)


def too_many_blocks() -> int:
    """A grid that has no room is refused before the launch."""
    group, case = Group.discover(), Case(Config(128, 1, 1, 1, 7), tokens=8)
    buffer, told = make_buffer(group, 2, "cuda", case), ""
    try:
        num_wrong(buffer, case, 0)
    except BadInput as error:
        told = str(error)
    wrong = int("blocks" not in told)
    sys.stdout.write(f"rank {group.rank}: 0 calls, {wrong} wrong; {told}\n")
    group.barrier()
    return wrong


if __name__ == "__main__":  # of one process, for compute-sanitizer
    sys.exit(run_residents(int(sys.argv[1]), many_calls))
