"""Counts, masks and prefix sums of two-hop dispatch, against loops over single tokens."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracekern.errors import BadInput
from tracekern.moe.two_hop.layout import (
    NODE_SIZES,
    Nodes,
    channel_prefix_matrix,
    channel_task_range,
    get_dispatch_layout,
    get_receive_layout,
    is_token_in_node,
)
from tracekern.moe.two_hop.reference import dispatch_reference

EXPERTS_OF_A_RANK = 3


def draw_choices(seed: int, nodes: Nodes) -> list[torch.Tensor]:
    """[num_tokens, topk] of each rank: ranks without tokens, tokens without experts, choices that are left out."""
    rng, topk = random.Random(seed), 1 + seed % 4
    num_experts = nodes.num_ranks * EXPERTS_OF_A_RANK
    drawn = []
    for _ in range(nodes.num_ranks):
        tokens = [rng.sample(range(num_experts), min(topk, num_experts)) for _ in range(rng.choice([0, 1, 5, 9]))]
        tokens = [[expert if rng.random() > 0.2 else -1 for expert in token] for token in tokens]
        drawn.append(torch.tensor(tokens, dtype=torch.int64).reshape(len(tokens), min(topk, num_experts)))
    return drawn


@given(
    seed=st.integers(0, 1 << 16),
    nodes=st.builds(Nodes, st.integers(1, 4), st.sampled_from(NODE_SIZES)),
    channels=st.integers(1, 12),
)
def test_rows_lie_where_the_prefix_sums_say(seed, nodes, channels):
    """A receiver places a row behind those of earlier ranks, and of earlier channels of the same rank."""
    num_experts = nodes.num_ranks * EXPERTS_OF_A_RANK
    topk_idx = draw_choices(seed, nodes)
    x = [torch.arange(len(idx)).reshape(-1, 1) + 1000 * rank for rank, idx in enumerate(topk_idx)]
    weights = [torch.rand(idx.shape) for idx in topk_idx]
    layouts = [get_dispatch_layout(idx, num_experts, nodes) for idx in topk_idx]
    rank = seed % nodes.num_ranks
    received = get_receive_layout(layouts, nodes, rank)
    delivered = dispatch_reference(x, topk_idx, weights, layouts, nodes, num_experts, rank)

    placed = {}
    for source, idx in enumerate(topk_idx):
        before = int(received.recv_gbl_rank_prefix_sum[source - 1]) if source else 0
        matrix = channel_prefix_matrix(layouts[source].is_token_in_rank, channels)
        for channel in range(channels):
            place = before + (int(matrix[rank, channel - 1]) if channel else 0)
            for token in channel_task_range(len(idx), channels, channel):
                local = [int(expert) - rank * EXPERTS_OF_A_RANK for expert in idx[token]]
                local = [
                    at if 0 <= at < EXPERTS_OF_A_RANK and expert >= 0 else -1
                    for at, expert in zip(local, idx[token], strict=True)
                ]
                if max(local) >= 0:
                    scaled = [float(w) if at >= 0 else 0.0 for at, w in zip(local, weights[source][token], strict=True)]
                    placed[place] = (token + 1000 * source, local, scaled, [source, token])
                    place += 1
            assert place == before + int(matrix[rank, channel])
    assert sorted(placed) == list(range(len(delivered.rows))) == list(range(int(received.recv_gbl_rank_prefix_sum[-1])))
    rows = zip(
        *(getattr(delivered, name).tolist() for name in ("rows", "topk_idx", "topk_weights", "source")), strict=True
    )
    assert [placed[place] for place in range(len(placed))] == [(row[0], *others) for row, *others in rows]


@given(seed=st.integers(0, 1 << 16), nodes=st.builds(Nodes, st.integers(1, 4), st.sampled_from(NODE_SIZES)))
def test_a_token_goes_to_a_node_once(seed, nodes):
    num_experts = nodes.num_ranks * EXPERTS_OF_A_RANK
    topk_idx = draw_choices(seed, nodes)
    layouts = [get_dispatch_layout(idx, num_experts, nodes) for idx in topk_idx]
    rank = seed % nodes.num_ranks
    node, peer = divmod(rank, nodes.peers)
    passed = [0]
    for source in range(peer, nodes.num_ranks, nodes.peers):
        experts_there = range(node * nodes.peers * EXPERTS_OF_A_RANK, (node + 1) * nodes.peers * EXPERTS_OF_A_RANK)
        goes = [any(int(expert) in experts_there for expert in token) for token in topk_idx[source]]
        assert is_token_in_node(layouts[source].is_token_in_rank, nodes)[:, node].tolist() == goes
        assert int(layouts[source].num_tokens_per_rdma_rank[node]) == sum(goes)
        passed.append(passed[-1] + sum(goes))
    received = get_receive_layout(layouts, nodes, rank, expert_alignment=4)
    assert received.recv_rdma_rank_prefix_sum.tolist() == passed[1:]
    chosen = torch.cat([idx.flatten() for idx in topk_idx]).tolist()
    counts = [chosen.count(rank * EXPERTS_OF_A_RANK + expert) for expert in range(EXPERTS_OF_A_RANK)]
    assert received.num_recv_tokens_per_expert == tuple((count + 3) // 4 * 4 for count in counts)


@given(num_tokens=st.integers(0, 200), num_channels=st.integers(1, 24))
def test_channels_share_the_tokens_in_their_order(num_tokens, num_channels):
    ranges = [channel_task_range(num_tokens, num_channels, channel) for channel in range(num_channels)]
    assert [token for tokens in ranges for token in tokens] == list(range(num_tokens))
    assert max(map(len, ranges)) == -(-num_tokens // num_channels)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Nodes.of(8, 3), "8 ranks on 3 nodes"),
        (lambda: Nodes.of(6, 2), "a node has 3 ranks; wanted one of 1, 2, 4, 8"),
        (lambda: get_dispatch_layout(torch.tensor([[0]]), 9, Nodes(2, 2)), "9 experts on 4 ranks"),
        (lambda: get_dispatch_layout(torch.tensor([[8]]), 8, Nodes(2, 2)), "experts 8 to 8; wanted -1 to 7"),
        (lambda: get_dispatch_layout(torch.tensor([[-2]]), 8, Nodes(2, 2)), "experts -2 to -2; wanted -1 to 7"),
    ],
)
def test_bad_input_is_told_in_one_line(make, told):
    with pytest.raises(BadInput, match=told):
        make()
