"""The overlapped variant: int4 experts multiply one partition while others are exchanged."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from int4_experts import draw_words, recorded_ring_tiles, ring_tiles
from rank_pool import RankPool
from timelines import LAUNCH, make_launch, make_spans, make_timeline, make_tracks

import tracekern
from tracekern.analysis.findings import Findings
from tracekern.analysis.graph.launch_graph import launches_ahead
from tracekern.analysis.questions.overlap import StreamOverlap, stream_overlaps
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.experts import draw_experts
from tracekern.moe.gemm.experts import Int4Experts
from tracekern.moe.p2p.overlap import num_overlapped, steps_of
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.p2p.reference import expected
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.timeline.facts.iterations import LaunchIterations
from tracekern.timeline.model import Flows, Timeline, TrackKind, field_values

SIZE, EXPERTS, TOPK, TOKENS = 128, 4, 2, 13
OF_EXPERTS = ("tiles", "k2_many", "k2", "k4_many", "k4")


@pytest.fixture(scope="module")
def pair() -> Iterator[Callable[..., list[object]]]:
    pool = RankPool(2)
    yield pool.call
    pool.close()


def int4_experts() -> Int4Experts:
    return Int4Experts.of(draw_words(EXPERTS, SIZE, 2 * SIZE, seed=3), draw_words(EXPERTS, SIZE, SIZE, seed=4))


def run(
    group: Group, partitions: int, tokens: tuple[int, ...], directory: str = "", how: dict[str, Any] | None = None
) -> list[bool]:
    """Whether each of three calls is right: of int4 experts, of such that scale, and of int4 experts again."""
    shape = MoeShape(group.num_ranks, TOKENS, EXPERTS, TOPK, SIZE, "bf16")
    grid = {"num_blocks": 2, "warps_per_block": 2, **(how or {})}
    pipeline = P2PPipeline(group, shape, "overlapped", partitions=partitions, **grid)
    most = dataclasses.replace(shape, max_tokens=tokens[group.rank])
    found = []
    for call, experts in enumerate((int4_experts(), draw_experts(shape), int4_experts())):
        batch = draw_batch(most, seed=1, rank=group.rank, iteration=call, routing="zipf", uneven=False)
        if directory and call == 2:
            with tracekern.capture(directory, device=pipeline.comm.device) as capture:
                out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=capture)
        else:
            out = pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts)
        pipeline.synchronize()
        found.append(torch.equal(out, expected("overlapped", batch, experts, shape)))
    return found


@pytest.mark.parametrize("partitions", [1, 2, 3, 13, 40])
def test_results_are_those_of_reduce_whatever_the_partitions(pair, partitions):
    assert pair(run, partitions, (TOKENS, TOKENS)) == [[True] * 3] * 2


@pytest.mark.parametrize("tokens", [(TOKENS, 1), (1, 5)])
def test_ranks_with_few_tokens_have_none_in_the_last_partitions(pair, tokens):
    assert pair(run, 3, tokens) == [[True] * 3] * 2


def test_kernels_may_have_other_numbers_of_blocks(pair):
    for how in ({"exchange_blocks": 1}, {"stage_blocks": {"combine": 1}}):
        assert pair(run, 3, (TOKENS, TOKENS), "", how) == [[True] * 3] * 2


def test_each_partition_has_kernels_of_its_own_that_see_its_rows_alone(tmp_path: Path):
    assert run(Group(0, 1), 3, (TOKENS,), str(tmp_path)) == [True] * 3
    timeline = tracekern.load(tmp_path)
    of_one = ("dispatch", *OF_EXPERTS)
    assert [launch.name for launch in timeline.launches] == [
        *of_one, *of_one, "combine", *of_one, "combine", "combine",
    ]  # fmt: skip
    batch = draw_batch(
        MoeShape(1, TOKENS, EXPERTS, TOPK, SIZE, "bf16"), seed=1, rank=0, iteration=2, routing="zipf", uneven=False
    )
    size = -(-TOKENS // 3)
    chosen = [batch.topk_idx[first : first + size].flatten() for first in range(0, TOKENS, size)]
    counts = [torch.bincount(some, minlength=EXPERTS).tolist() for some in chosen]
    assert recorded_ring_tiles(timeline) == sum(
        (ring_tiles(kernel, some, SIZE) for kernel in ("k2", "k4") for some in counts), Counter()
    )
    for stage, event, field in (("dispatch", "copy_row", "slot"), ("combine", "reduce_token", "token")):
        launches = [idx for idx, launch in enumerate(timeline.launches) if launch.name == stage]
        kind = next(kind for kind in timeline.events if kind.name == event)
        for partition, launch in enumerate(launches):
            rows = np.intersect1d(timeline.rows_of(event), np.flatnonzero(timeline.spans.launch == launch))
            places = field_values(kind, field, timeline.spans, rows)
            assert set(places.tolist()) == set(range(partition * size, min(TOKENS, partition * size + size)))


def record_calls(group: Group, directory: str) -> None:
    shape, experts = MoeShape(group.num_ranks, TOKENS, EXPERTS, TOPK, SIZE, "bf16"), int4_experts()
    pipeline = P2PPipeline(group, shape, "overlapped", partitions=3, num_blocks=2, warps_per_block=2)
    batch = draw_batch(shape, seed=1, rank=group.rank, iteration=0, routing="zipf", uneven=False)
    with tracekern.capture(directory, device=pipeline.comm.device) as capture:
        for _ in range(4):
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=capture)


def test_all_kernels_of_a_call_are_one_iteration(tmp_path: Path):
    record_calls(Group(0, 1), str(tmp_path))
    launches = LaunchIterations(tracekern.load(tmp_path))
    assert launches.count == 4
    assert not launches.set_up_stages
    assert np.bincount(launches.of_launch).tolist() == [3 * (2 + len(OF_EXPERTS))] * 4


@pytest.mark.parametrize("partitions", range(1, 7))
@pytest.mark.parametrize("of_experts", [(), OF_EXPERTS])
def test_a_partition_comes_in_ahead_of_the_results_of_the_one_before(partitions: int, of_experts: tuple[str, ...]):
    steps = steps_of(partitions, of_experts)
    places = {(step.stage, step.partition): place for place, step in enumerate(steps)}
    assert len(places) == len(steps) == partitions * (2 + len(of_experts))
    for stage, after in zip(("dispatch", *of_experts), (*of_experts, "combine"), strict=True):
        assert all(places[stage, number] < places[after, number] for number in range(partitions))
    assert all(places["dispatch", number + 1] < places["combine", number] for number in range(partitions - 1))
    assert all(places["combine", number] < places["dispatch", number + 2] for number in range(partitions - 2))
    told: set[str] = set()
    for step in steps:  # nothing waits for an event that was not recorded before
        assert step.waits_for in told | {""}
        told.add(step.tells)


def test_partitions_are_chosen_by_the_rows_of_an_expert():
    def chosen(tokens: int) -> int:
        return num_overlapped(MoeShape(4, tokens, 256, 8, 7168, "bf16"))

    numbers = [chosen(tokens) for tokens in (1, 64, 512, 1024, 2048, 4096, 65536)]
    assert numbers[0] == numbers[1] == 1
    assert numbers == sorted(numbers)
    assert numbers[-1] == max(numbers) > 1


def test_counts_that_fit_no_block_are_refused():
    shape = MoeShape(1, 64, 4096, 2, SIZE, "bf16")
    with pytest.raises(BadInput, match=r"partitions is 9; with 4096 experts overlapped takes at most 2"):
        P2PPipeline(Group(0, 1), shape, "overlapped", partitions=9)


# ---- what the report says of it ----


def timeline_of(rows: list[tuple[int, int, int]], num_streams: int = 2, num_calls: int = 2) -> Timeline:
    """One rank that launches kernels "a", "b", "c" on a stream each. rows: (stream, start, end) of a call."""
    tracks = make_tracks(1)
    lanes = [len(tracks) + number for number in range(num_streams)]
    tracks += tuple(
        dataclasses.replace(tracks[0], stream=number, name=f"kernels {number}") for number in range(num_streams)
    )
    assert tracks[0].kind == TrackKind.LAUNCH
    launches = []
    spans = []
    for call in range(num_calls):
        for stream, start, end in rows:
            at = 10_000 * call
            spans.append((lanes[stream], LAUNCH, len(launches), at + start, at + end, 0, 0))
            launches.append(dataclasses.replace(make_launch(0, "abc"[stream], call), epoch=call + 1, stream=stream))
    return make_timeline(1, tracks=tracks, launches=tuple(launches), spans=make_spans(spans), flows=Flows())


def test_a_kernel_is_taken_to_follow_the_one_of_its_rank_that_ended_last():
    rows = [(0, 0, 100), (1, 110, 300), (0, 120, 150), (0, 310, 400)]
    schedule = Findings(timeline_of(rows)).recorded.schedule
    #                                   a, b, a beside it, a behind it; the same once more
    assert schedule.before.tolist()[:8] == [-1, -1, 0, 2, 3, 1, 4, 6]
    assert launches_ahead(schedule).tolist()[:8] == [-1, 0, 0, 1, 3, 4, 4, 5]


def test_time_beside_other_streams_counts_once_and_without_the_first_call():
    assert stream_overlaps(timeline_of([(0, 0, 100), (1, 60, 260)])) == (
        StreamOverlap(0, ("a",), 100, 40),
        StreamOverlap(0, ("b",), 200, 40),
    )
    found = stream_overlaps(timeline_of([(0, 0, 100), (1, 60, 260), (2, 80, 90)], num_streams=3))
    assert [(stream.busy_ns, stream.beside_ns) for stream in found] == [(100, 40), (200, 40), (10, 10)]
    assert stream_overlaps(timeline_of([(0, 0, 100), (0, 200, 300)])) == ()
