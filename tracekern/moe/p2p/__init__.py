"""Dispatch and combine by stores into the peers' memory, in several variants."""

from __future__ import annotations

from tracekern.moe.family import Family, Option
from tracekern.moe.p2p.pipeline import MAX_PARTITIONS, P2PPipeline
from tracekern.moe.p2p.reference import REDUCING, expected

FAMILY = Family(
    name="p2p",
    takes_stage_blocks=True,
    make_pipeline=P2PPipeline,
    expected=lambda variant, batch, experts, shape, _: expected(variant, batch, experts, shape),
    reference_name=lambda variant: "rank_reduced_reference" if variant in REDUCING else "reference",
    sent_events=frozenset({"copy_token", "copy_row"}),
    received_events=frozenset({"receive_token", "wait_row"}),
    options=(
        Option(
            name="partitions",
            help="Partitions of a rank's tokens in pipelined, two in flight at a time; 0: by their bytes.",
            high=MAX_PARTITIONS,
            variants=("pipelined",),
            describe=lambda number: f"in at most {number} partitions" if number > 1 else "",
        ),
    ),
)
