"""One rank of `slow_link.py --slow-link`: times dispatch and combine of variants over links of some rates."""

from __future__ import annotations

import argparse
import time
from typing import Any, Protocol

from ranks import print_row, this_rank

TIMED = ("two_hop", "reduce", "dedup", "token")
Leg = tuple[int, int]
"""Begin and end on this rank, in ns of the host's clock."""


class Call(Protocol):
    comm: Any

    def legs(self) -> tuple[Leg, Leg]:
        """Runs dispatch and combine, each behind a barrier of the ranks."""


def measure() -> None:
    """Prints a row for each call: variants in turns at each rate, and so all over again. Round 0 is not to be used."""
    with this_rank() as (options, group):
        calls = {variant: make_call(group, options, variant) for variant in TIMED}
        for number in range(options.rounds + 1):
            for gb_per_s in (0.0, *options.slow_link):
                for variant, call in calls.items():
                    call.comm.set_slow_link(gb_per_s, options.nodes)
                    dispatch, combine = call.legs()
                    about = {"round": number, "gb_per_s": gb_per_s, "variant": variant}
                    print_row(group.rank, {**about, "dispatch": dispatch, "combine": combine})


def make_call(group: Any, options: argparse.Namespace, variant: str) -> Call:
    from tracekern.moe.routing import draw_batch
    from tracekern.moe.shape import MoeShape

    shape = MoeShape(options.ranks, options.tokens, options.experts, options.topk, options.hidden, "bf16")
    batch = draw_batch(shape, seed=7, rank=group.rank, iteration=0, routing="uniform", uneven=False)
    return TwoHop(group, shape, batch, options.nodes) if variant == "two_hop" else OneHop(group, shape, batch, variant)


class OneHop:
    """A variant of the p2p family. Experts belong to combine where they are no kernel of their own."""

    def __init__(self, group: Any, shape: Any, batch: Any, variant: str) -> None:
        from tracekern.moe.experts import draw_experts
        from tracekern.moe.p2p import FAMILY

        self._group, self._batch, self._experts = group, batch, draw_experts(shape)
        self._pipeline = FAMILY.make_pipeline(group, shape, variant, timeout_s=60.0, backend="cpu")
        self.comm, stages = self._pipeline.comm, FAMILY.variants[variant]
        self._before_combine = stages[[stage.startswith("combine") for stage in stages].index(True) - 1]

    def legs(self) -> tuple[Leg, Leg]:
        batch, ended, began = self._batch, [], []

        def after_stage(stage: str) -> None:
            if stage.startswith("dispatch"):
                ended.append(time.monotonic_ns())
            if stage == self._before_combine:
                self._group.barrier()
                began.append(time.monotonic_ns())

        self._group.barrier()
        first = time.monotonic_ns()
        self._pipeline(batch.x, batch.topk_idx, batch.topk_weights, self._experts, after_stage=after_stage)
        return (first, ended[-1]), (began[0], time.monotonic_ns())


class TwoHop:
    """Calls of a Buffer, without experts: rows go back as they came."""

    def __init__(self, group: Any, shape: Any, batch: Any, num_nodes: int) -> None:
        from tracekern.moe.two_hop import FAMILY

        self._group, self._shape, self._batch = group, shape, batch
        self._pipeline = FAMILY.make_pipeline(group, shape, timeout_s=60.0, backend="cpu", nodes=num_nodes)
        self._buffer, self.comm = self._pipeline.buffer, self._pipeline.comm

    def legs(self) -> tuple[Leg, Leg]:
        buffer, batch, topk_idx = self._buffer, self._batch, self._batch.topk_idx.long()
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, self._shape.num_experts)
        chosen = per_rank, per_node, in_rank, per_expert, topk_idx, batch.topk_weights
        self._group.barrier()
        first = time.monotonic_ns()
        recv_x, _, _, _, handle, _ = buffer.dispatch(batch.x, None, *chosen, config=self._pipeline.config)
        dispatch = first, time.monotonic_ns()
        self._group.barrier()
        first = time.monotonic_ns()
        buffer.combine(recv_x, handle)
        return dispatch, (first, time.monotonic_ns())
