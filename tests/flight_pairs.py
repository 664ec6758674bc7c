"""A pair of ranks with a small pipeline between them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tracekern.comm.ranks.group import Group
from tracekern.moe.experts import draw_experts
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.reference import reference
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.record.session import Capture

PAIR_SHAPE = MoeShape(num_ranks=2, max_tokens=4, num_experts=4, topk=2, hidden=8, dtype="fp32")


def make_pair(group: Group, **options: object) -> tuple[P2PPipeline, Callable[[int], bool]]:
    """The pipeline of a rank, and a call of it that says whether the result is right."""
    pipeline = P2PPipeline(group, PAIR_SHAPE, "balanced", num_blocks=1, warps_per_block=2, **options)
    experts = draw_experts(PAIR_SHAPE)

    def call(iteration: int, session: Capture | None = None) -> bool:
        batch = draw_batch(PAIR_SHAPE, seed=1, rank=group.rank, iteration=iteration, routing="uniform", uneven=True)
        out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=session)
        return bool((out.view(torch.int32) == reference(batch, experts).view(torch.int32)).all())

    return pipeline, call
