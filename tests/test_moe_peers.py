"""benchmarks/moe_peers.py: what it hands to torch's all_to_all_vdev_2d, against the operation's order of steps."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest
import torch
from toolchains import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import moe_peers
from symmetric import World

from tracekern.moe.experts import draw_experts
from tracekern.moe.reference import reference
from tracekern.moe.routing import Batch, draw_batch
from tracekern.moe.shape import MoeShape


def shape_of(num_ranks: int, experts_each: int = 4) -> MoeShape:
    return MoeShape(num_ranks, 12, experts_each * num_ranks, min(4, experts_each * num_ranks), 23, "bf16")


def batches(shape: MoeShape, rank: int, calls: int) -> list[Batch]:
    """Of uneven length: a rank may have no token, or one."""
    drawn = []
    for call in range(calls):
        tokens = [0, 1, shape.max_tokens, 5][(rank + call) % 4]
        small = dataclasses.replace(shape, max_tokens=max(tokens, 1))
        batch = draw_batch(small, seed=3, rank=rank, iteration=call, routing="uniform", uneven=False)
        drawn.append(Batch(batch.x[:tokens], batch.topk_idx[:tokens], batch.topk_weights[:tokens]))
    return drawn


def test_rows_lie_as_the_manual_draws_them():
    """Two ranks, two groups each: c0 c1 c2 c3 on rank 0 and d0 d1 d2 d3 on rank 1 become c0 d0 c1 d1, c2 d2 c3 d3."""
    splits = np.array([[5, 2, 0, 4], [7, 0, 0, 6]])
    counts, offsets, first_rows = (column.tolist() for column in moe_peers.dispatched(splits, 0))
    assert (counts, offsets, first_rows) == ([5, 7, 2, 0], [0, 5, 12, 14], [0, 0, 5, 7])
    # Nobody has a row for group 0 of rank 1: it takes one.
    counts, offsets, first_rows = (column.tolist() for column in moe_peers.dispatched(splits, 1))
    assert (counts, offsets, first_rows) == ([0, 0, 4, 6], [0, 0, 1, 5], [7, 7, 7, 7])


@pytest.mark.parametrize(("num_ranks", "experts_each"), [(1, 4), (2, 4), (3, 4), (4, 32)])
@pytest.mark.parametrize("slow", [-1, 0, 1])
def test_calls_in_a_row_give_the_bits_of_reference(num_ranks, experts_each, slow):
    shape = shape_of(num_ranks, experts_each)
    experts = draw_experts(shape)

    def body(exchange: moe_peers.Exchange) -> None:
        peer = moe_peers.Vdev2d(shape, exchange)
        for batch in batches(shape, exchange.rank, 4):
            found, wanted = peer(batch, experts), reference(batch, experts)
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))

    World(num_ranks, slow if slow < num_ranks else -1).run(body)


def test_an_operation_right_behind_one_with_the_same_table_goes_wrong():
    """Why a row carries its expert along instead of sending it in a second exchange: rank 0's places, noted for the
    second one, are overwritten by a rank that is late with the first."""
    splits = torch.tensor([[3, 1, 2, 2], [2, 2, 1, 3]])

    def rows_of(exchange: moe_peers.Exchange, share_table: bool) -> list[int]:
        source, out = exchange.empty(8, 1, dtype=torch.int64), exchange.empty(16, 1, dtype=torch.int64)
        tables = [exchange.empty(2, 4, dtype=torch.int64) for _ in range(2)]
        mine = exchange.empty(4, dtype=torch.int64)
        source[:, 0], mine[:] = 10 * exchange.rank + torch.arange(8), splits[exchange.rank]
        exchange.dispatch(source, out, mine, tables[0])
        exchange.dispatch(source, out, mine, tables[0 if share_table else 1])
        return out[: int(splits[:, 2 * exchange.rank :][:, :2].sum()), 0].tolist()

    wanted = [[0, 1, 2, 10, 11, 3, 12, 13], [4, 5, 14, 6, 7, 15, 16, 17]]
    assert World(2, slow=1).run(lambda exchange: rows_of(exchange, False)) == wanted
    assert World(2, slow=1).run(lambda exchange: rows_of(exchange, True))[1] != wanted[1]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda peer: None, "every row went where it should"),
        (
            lambda peer: peer.there[1].add_(1),
            "12 offsets, first of group 0 from rank 0: wanted 0, got 1",
        ),
        (
            lambda peer: peer.tags(peer.received)[2:4, 2].add_(100),
            "2 of 17 rows came wrong, first at place 2: wanted row 0 of rank 1 for expert 0, got row 100 of rank 1 for "
            "expert 0",
        ),
        (
            lambda peer: peer.tags(peer.returned)[5, 1].fill_(2),
            "1 of 20 rows came back wrong, first at place 5: wanted row 5 of rank 0 for expert",
        ),
    ],
)
def test_a_diagnosis_names_the_first_row(spoil, told):
    shape = MoeShape(3, 5, 12, 4, 24, "bf16")
    world = World(3)
    values, lines = world.all_gather(), {}

    def body(exchange: moe_peers.Exchange) -> None:
        peer = moe_peers.Vdev2d(shape, exchange)
        batch = draw_batch(shape, seed=1, rank=exchange.rank, iteration=0, routing="uniform", uneven=False)
        peer(batch, draw_experts(shape))
        world.barrier(exchange.rank)  # nobody pulls any more
        if exchange.rank == 0:
            spoil(peer)

        def gather(value: Any) -> list[Any]:
            return values(exchange.rank, value)

        lines[exchange.rank] = peer.diagnose(gather)

    world.run(body)
    assert lines[1] == lines[2] == "every row went where it should"
    assert told in lines[0], lines[0]
