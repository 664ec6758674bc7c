"""Dispatch and combine across nodes in two hops (docs/two_hop.md)."""

from __future__ import annotations

from collections.abc import Callable

from tracekern.moe.family import Family, Option
from tracekern.moe.two_hop.buffer import Buffer
from tracekern.moe.two_hop.pipeline import (
    HIGHEST,
    TwoHopPipeline,
    count_wrong_elements,
    heap_options,
    tensor_bytes,
    why_unsuitable,
)
from tracekern.moe.two_hop.settings import Config

__all__ = ["FAMILY", "Buffer", "Config"]


def _option(name: str, about: str, describe: Callable[[int], str] = lambda number: "") -> Option:
    return Option(name=name, help=about, high=HIGHEST[name], variants=("two_hop",), describe=describe)


FAMILY = Family(
    name="two_hop",
    variants={"two_hop": TwoHopPipeline.stages},
    make_pipeline=TwoHopPipeline,
    expected=None,
    count_wrong=count_wrong_elements,
    reference_name=lambda variant: "node_reduced_reference",
    why_unsuitable=why_unsuitable,
    tensor_bytes=tensor_bytes,
    heap_options=heap_options,
    queue_options={"is_queued": True},
    expert_rows="copied",
    sent_events=frozenset({"copy_to_ring"}),
    received_events=frozenset({"receive_token"}),
    options=(
        _option("nodes", "Nodes that two_hop splits the ranks into.", lambda number: f"on {number} nodes"),
        _option("channels", "Channels of two_hop, two blocks each.", lambda number: f"in {number} channels"),
        _option("nvl_send", "Tokens that two_hop hands on within a node at a time."),
        _option("nvl_recv", "Slots of a ring within a node."),
        _option("rdma_send", "Tokens that two_hop sends to another node at a time."),
        _option("rdma_recv", "Slots of a ring between nodes, a multiple of rdma_send and at least 6 more."),
    ),
)
