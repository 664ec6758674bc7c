"""Dispatch and combine by stores into the peers' memory: the designs of seed 002, each variant a step of it."""

from __future__ import annotations

from tracekern.formatting import count
from tracekern.moe.family import Family, Option
from tracekern.moe.p2p.pipeline import MAX_PARTITIONS, P2PPipeline
from tracekern.moe.p2p.reference import REDUCING, expected

FAMILY = Family(
    name="p2p",
    make_pipeline=P2PPipeline,
    expected=expected,
    reference_name=lambda variant: "rank_reduced_reference" if variant in REDUCING else "reference",
    sent_events=frozenset({"copy_token", "copy_row"}),
    received_events=frozenset({"receive_token", "wait_row"}),
    options=(
        Option(
            name="partitions",
            help="Of a rank's tokens in pipelined, two under way at a time; 0: by their bytes.",
            high=MAX_PARTITIONS,
            variants=("pipelined",),
            describe=lambda number: f"in at most {count(number, 'partition')}",
        ),
    ),
)
