"""Kernels of one call with different numbers of blocks: results, what is on record, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool

import tracekern
from tests.warm_ranks import run_moe
from tracekern.cli.commands.run_moe import _print, _Result
from tracekern.cli.options import parse_blocks
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.experts import draw_experts
from tracekern.moe.family import blocks_by_stage
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.p2p.reference import expected
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.moe.workload.options import MoeRun

RANKS = 2
SHAPE = MoeShape(RANKS, 9, 8, 3, 64, "bf16")
STAGES = ("dispatch_send", "dispatch_recv", "scale_experts", "combine_send", "combine_recv")


def calls(group: Group, variant: str, directory: str) -> list[bool]:
    """Whether three calls in a row, of which the last is on record, have the bits of the reference."""
    blocks = {"combine": 5, "dispatch_recv": 1}
    pipeline = P2PPipeline(group, SHAPE, variant, num_blocks=3, warps_per_block=2, stage_blocks=blocks)
    experts, found = draw_experts(SHAPE), []
    for iteration in range(3):
        batch = draw_batch(SHAPE, seed=1, rank=group.rank, iteration=iteration, routing="uniform", uneven=False)
        call = batch.x, batch.topk_idx, batch.topk_weights, experts
        if iteration == 2:
            with tracekern.capture(directory, device=pipeline.comm.device) as capture:
                out = pipeline(*call, capture=capture)
        else:
            out = pipeline(*call)
        pipeline.synchronize()
        found.append(torch.equal(out, expected(variant, batch, experts, SHAPE)))
    return found


@pytest.mark.parametrize("variant", ["flag", "balanced"])
def test_kernels_have_grids_of_their_own_and_the_same_result(pools, tmp_path: Path, variant: str):
    pool: RankPool = pools(RANKS)
    assert pool.call(calls, variant, str(tmp_path)) == [[True] * 3] * RANKS
    timeline = tracekern.load(tmp_path)
    assert not timeline.problems
    blocks = {launch.name: launch.num_blocks for launch in timeline.launches if launch.name in STAGES}
    wanted = {"dispatch_send": 3, "dispatch_recv": 1, "scale_experts": 3, "combine_send": 5, "combine_recv": 5}
    assert blocks == {name: number for name, number in wanted.items() if name in blocks}
    assert {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"} <= blocks.keys()


def test_a_name_stands_for_a_kernel_or_for_those_that_begin_with_it():
    assert blocks_by_stage(STAGES, {"combine": 4, "combine_recv": 7}) == {"combine_send": 4, "combine_recv": 7}
    with pytest.raises(BadInput, match=re.escape("blocks of 'comb': no such kernel; the variant has dispatch_send, ")):
        blocks_by_stage(STAGES, {"comb": 4})
    with pytest.raises(BadInput, match=re.escape("blocks of combine is 0; wanted 1 to 4096")):
        blocks_by_stage(STAGES, {"combine": 0})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", (0, {})),
        ("128", (128, {})),
        ("combine=304", (0, {"combine": 304})),
        ("64,combine=304,dispatch_recv=8", (64, {"combine": 304, "dispatch_recv": 8})),
    ],
)
def test_blocks_as_they_are_typed(text, wanted):
    assert parse_blocks(text) == wanted


@pytest.mark.parametrize("text", ["", "x", "combine=", "=4", "combine=4,", "combine=x"])
def test_what_is_no_number_of_blocks_is_refused(text):
    with pytest.raises(BadInput, match=f"^--blocks: got {text!r}, wanted a number, KERNEL=NUMBER, or several"):
        parse_blocks(text)


def test_a_sweep_times_each_kernel_with_other_numbers_and_says_what_is_fastest(capsys):
    options = MoeRun(
        **{"ranks": RANKS, "variant": "reduce", "tokens": 8, "hidden": 64, "experts": 4, "topk": 2, "backend": "cpu"},
        **{"warps": 1, "stage_blocks": {"combine": 600}, "trace": False, "sweep_blocks": True},
    )
    report = run_moe(options, "")
    assert report.ok, report.errors
    first, second = (rank.sweep for rank in report.ranks)
    assert first == second
    tried = {
        kernel: [c["blocks"][kernel] for c in first if c["kernel"] == kernel] for kernel in ("dispatch", "combine")
    }
    assert tried == {"dispatch": [1, 2, 3, 6, 8], "combine": [75, 150, 300, 450, 900, 1200]}
    refused = [choice for choice in first if choice["problem"]]
    assert [choice["problem"] for choice in refused] == ["blocks of combine is 1200; wanted 1 to 1024"]
    assert first[0]["blocks"] == {"dispatch": 4, "combine": 600}
    for choice in first:
        if choice not in refused:
            assert choice["kernel_us"].keys() == {"dispatch", "combine"}
            assert 0 < max(choice["kernel_us"].values()) <= choice["call_us"]
    _print(_Result(report))
    said = capsys.readouterr().out
    assert re.search(r"^ +4 .* dispatch +usual", said, re.MULTILINE)
    assert re.search(r"^ +1,200 +- +- +combine +blocks of combine is 1200; wanted 1 to 1024$", said, re.MULTILINE)
    best = min((choice for choice in first if not choice["problem"]), key=lambda choice: choice["call_us"])
    told = "no other number" if best is first[0] else "with --blocks combine="
    if best["blocks"]["dispatch"] != 4:
        told = f" with --blocks dispatch={best['blocks']['dispatch']},combine={best['blocks']['combine']}"
    assert told in said
    assert "every result equals the rank reduced reference, bit by bit" in said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"variant": "low_latency"}, "sweep-blocks is on; variant low_latency has no such choice"),
        ({"variant": "overlapped"}, "sweep-blocks is on; kernels of variant overlapped run side by side"),
        ({"host_driven": True}, "sweep-blocks times calls that are queued back to back; leave host-driven out"),
        ({"trace": True}, "sweep-blocks times calls that are not recorded; wanted trace=False"),
    ],
)
def test_what_a_sweep_cannot_be_of_is_refused(options, why):
    with pytest.raises(BadInput, match=re.escape(why)):
        MoeRun(**{"ranks": 2, "trace": False, "sweep_blocks": True, **options})


def test_a_run_refuses_blocks_of_kernels_that_its_variant_does_not_have():
    with pytest.raises(BadInput, match="^blocks of combine: variant low_latency has no such choice"):
        MoeRun(2, "low_latency", stage_blocks={"combine": 4})
    with pytest.raises(BadInput, match="^blocks of 'combine': no such kernel; the variant has dispatch_combine"):
        MoeRun(2, "pipelined", stage_blocks={"combine": 4})
