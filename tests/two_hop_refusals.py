"""Two-hop calls that kernels refuse: ranks differ, more came than there is memory for, or a handle is damaged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

from two_hop_check import Case, bring, combine_wrong, combined_wanted, dispatch, num_wrong, repeat_wrong, rows_of

from tracekern.errors import BadInput
from tracekern.moe.two_hop import Buffer, checks

ODD_RANK = 1
"""The one that differs from the others."""
DAMAGE = (
    ("recv_gbl_channel_prefix_matrix", "combine"),
    ("recv_rdma_channel_prefix_matrix", "combine"),
    ("recv_gbl_rank_prefix_sum", "combine"),
    ("gbl_channel_prefix_matrix", "dispatch"),
    ("recv_rdma_rank_prefix_sum", "dispatch"),
)
"""Parts of a handle that the kernels of a call index with."""


DIFFERENT = r"ranks \d and \d make different calls, or give handles of different dispatches; make the same calls .*"
OVERFLOW = rf"rank {ODD_RANK}: \d+ tokens came, .* num_worst_tokens was less; .* at least \d+"
DAMAGED = r"rank \d: a handle has numbers that no dispatch wrote; give it as dispatch\(\) returned it"


def is_as_wanted(name: str, told: str) -> bool:
    """Returns whether a spoilt or damaged call was refused in the right words."""
    wanted = DAMAGED if "damaged" in name else OVERFLOW if "overflow" in name else DIFFERENT
    return re.fullmatch(wanted, told) is not None


def align(buffer: Buffer) -> None:
    """Waits for the calls of all ranks: one that is still in the call before a refused one raises there."""
    buffer.comm.synchronize()
    buffer.group.barrier()


def refusal_of(buffer: Buffer, call: Callable[[], Any]) -> str:
    """Returns what a call raises. Collective: resets the buffer."""
    told = ""
    align(buffer)
    try:
        call()
        buffer.synchronize()
    except BadInput as error:
        told = str(error)
    buffer.reset()
    return told


def spoilt_calls(buffer: Buffer, case: Case) -> tuple[dict[str, str], int]:
    """Makes each call that is spoilt, then right ones. Returns what was raised, and how much of the others is wrong."""
    is_odd, device = buffer.rank == ODD_RANK, buffer.comm.device.torch_device
    brought = [bring(case, buffer.group_size, buffer.rank, seed) for seed in (1, 2)]
    given = [one.to(device) for one in brought]
    first, second = received = [dispatch(buffer, case, one) for one in given]
    x, other = given[is_odd].x, received[is_odd]
    rows, weights = rows_of(first.recv_x, buffer.rank), first.recv_topk_weights

    def overflow(combines: bool) -> None:
        brief = dispatch(buffer, case, given[0], num_worst_tokens=1 if is_odd else 4096)
        align(buffer)
        if combines:
            buffer.combine(brief.recv_x, brief.handle)
        else:
            buffer.dispatch(given[0].x, brief.handle)

    spoilt: dict[str, Callable[[], Any]] = {
        "other handle, combine": lambda: buffer.combine(other.recv_x, other.handle),
        "other handle, dispatch": lambda: buffer.dispatch(x, other.handle),
        "dispatch beside combine": lambda: (
            buffer.combine(rows, first.handle) if is_odd else buffer.dispatch(given[0].x, first.handle)
        ),
        "weights": lambda: buffer.combine(rows, first.handle, weights if is_odd else None),
        "overflow, combine": lambda: overflow(combines=True),
        "overflow, dispatch": lambda: overflow(combines=False),
    }
    if buffer.group.num_residents == 1:  # residents launch as many kernels at a time
        spoilt["new dispatch"] = lambda: (
            buffer.combine(rows, first.handle) if is_odd else dispatch(buffer, case, given[0])
        )
    told = {name: refusal_of(buffer, call) for name, call in spoilt.items()}
    wrong = combine_wrong(buffer, first, combined_wanted(case, buffer.nodes, brought[0]))  # the older of two handles
    wrong += repeat_wrong(buffer, brought[0], first) + repeat_wrong(buffer, brought[1], second)
    return told, wrong + num_wrong(buffer, case, 3)


def damaged_calls(buffer: Buffer, case: Case) -> tuple[dict[str, str], int]:
    """The same where one rank's handle is damaged, and nothing but the kernels looks at its numbers."""
    given = bring(case, buffer.group_size, buffer.rank, 1).to(buffer.comm.device.torch_device)
    received, told = dispatch(buffer, case, given), {}
    calls = {
        "combine": lambda: buffer.combine(received.recv_x, received.handle),
        "dispatch": lambda: buffer.dispatch(given.x, received.handle),
    }
    is_one_node = buffer.nodes.num_nodes == 1
    more = ("send_rdma_head", "combine") if is_one_node else ("rdma_channel_prefix_matrix", "dispatch")
    with mock.patch.object(checks, "_check_handle_numbers"):
        for part, name in (*DAMAGE, more):
            tensor = getattr(received.handle, part)
            right = tensor.clone()
            if buffer.rank == ODD_RANK:
                tensor.fill_(1 << 18)
            told[f"damaged {part}, {name}"] = refusal_of(buffer, calls[name])
            tensor.copy_(right)
    return told, num_wrong(buffer, case, 2)
