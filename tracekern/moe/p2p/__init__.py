"""Dispatch and combine by stores into the peers' memory, in several variants."""

from __future__ import annotations

from tracekern.moe.family import Family, Option
from tracekern.moe.p2p.overlap import OVERLAPPED
from tracekern.moe.p2p.pipeline import MAX_PARTITIONS, STAGES, P2PPipeline
from tracekern.moe.p2p.reference import REDUCING, expected

FAMILY = Family(
    name="p2p",
    variants=STAGES,
    takes_stage_blocks=True,
    side_by_side=frozenset({OVERLAPPED}),
    make_pipeline=P2PPipeline,
    expected=lambda variant, batch, experts, shape, _: expected(variant, batch, experts, shape),
    reference_name=lambda variant: "rank_reduced_reference" if variant in REDUCING else "reference",
    sent_events=frozenset({"copy_token", "copy_row"}),
    received_events=frozenset({"receive_token", "wait_row"}),
    options=(
        Option(
            name="partitions",
            help="Partitions of a rank's tokens in pipelined, two in flight at a time, and in overlapped; 0: by their "
            "bytes, in overlapped by the rows of an expert.",
            high=MAX_PARTITIONS,
            variants=("pipelined", OVERLAPPED),
            describe=lambda number: f"in at most {number} partitions" if number > 1 else "",
        ),
        Option(
            name="exchange_blocks",
            help="Blocks of dispatch and combine in overlapped while int4 experts multiply on the other SMs; 0: as "
            "many as keep up with these.",
            high=4096,
            variants=(OVERLAPPED,),
            describe=lambda number: f"{number} blocks for the exchange beside int4 experts" if number else "",
        ),
    ),
)
