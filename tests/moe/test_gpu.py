"""The same kernels, results and captures on real GPUs; skipped where there are none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from devices import one_rank, require_gpus

import tracekern
from tracekern.analysis.findings import analyze
from tracekern.comm.ranks.group import Group
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.launcher.spawner import Spawner
from tracekern.moe.calls.pipeline import SPARE_SMS
from tracekern.moe.p2p.pipeline import STAGES, P2PPipeline
from tracekern.moe.shape import MoeShape
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.run import WORKER, run
from tracekern.record.overhead import WARPS_PER_SM, measure_span
from tracekern.record.session import capture
from tracekern.timeline.model import Rank

SHAPE = {"tokens": 64, "hidden": 2880, "topk": 6, "iterations": 4, "backend": "cuda"}


def options(ranks: int, partitions: int = 0, **changes: object) -> MoeRun:
    """Made before a test is skipped: without GPUs, too, it shows what MoeRun refuses. partitions: where it has some."""
    if changes.get("variant") in ("pipelined", "overlapped"):
        changes["family_options"] = {"partitions": partitions}
    return MoeRun(**{**SHAPE, "ranks": ranks, "experts": 8 * ranks, **changes})


@pytest.fixture(scope="module")
def spawner() -> Iterator[Spawner | None]:
    """Imports torch once for all runs. None without a GPU, where all of them are skipped."""
    if not torch.cuda.device_count():
        yield None
        return
    with Spawner(WORKER, os.environ) as shared:
        yield shared


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("variant", list(STAGES))
def test_one_gpu_gives_the_bits_of_reference(tmp_path, spawner, variant, dtype):
    asked = options(1, variant=variant, dtype=dtype, partitions=2)
    require_gpus(1)
    run(asked, tmp_path, spawner=spawner).raise_for_error()


@pytest.mark.multigpu
@pytest.mark.parametrize("routing", ["uniform", "zipf", "one-hot-rank"])
@pytest.mark.parametrize("variant", list(STAGES))
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gpus_give_the_bits_of_reference(tmp_path, spawner, ranks, variant, routing):
    """On a GPU each. Where there are fewer, test_resident_ranks_give_the_bits_of_reference takes its place."""
    asked = options(ranks, variant=variant, routing=routing, hidden=97, partitions=3)
    require_gpus(ranks)
    run(asked, tmp_path, spawner=spawner).raise_for_error()


def require_too_few_gpus(ranks: int = 8) -> None:
    require_gpus(1)
    if torch.cuda.device_count() >= ranks:
        pytest.skip(f"each of {ranks} ranks has a GPU of its own here")


def assert_one_clock(ranks: Sequence[Rank]) -> None:
    """Ranks of one GPU read the same clock, so that they have one map to the axis."""
    for rank in ranks:
        twin = next(other for other in ranks if other.clock_id == rank.clock_id)
        assert rank.clock_id
        assert (rank.clock.anchor_ticks, rank.clock.anchor_ns) == (twin.clock.anchor_ticks, twin.clock.anchor_ns)
        assert rank.clock.hard_ns == twin.clock.hard_ns


# A run takes seconds: each variant once with 8 ranks, and every routing and number type with some of them.
RESIDENT = [
    options(8, variant="flag", routing="uniform", hidden=97),
    options(8, variant="token", routing="zipf", dtype="fp16"),
    options(8, variant="fused", routing="one-hot-rank", hidden=97),
    options(8, variant="balanced", routing="zipf", hidden=255, dtype="fp32"),
    options(8, variant="dedup", routing="one-hot-rank", topk=8),
    options(8, variant="reduce", routing="uniform", hidden=97, dtype="fp32"),
    options(8, variant="pipelined", routing="zipf", hidden=97, partitions=3),
    options(8, variant="overlapped", routing="zipf", hidden=97, partitions=3),
    options(2, variant="token", routing="one-hot-rank", hidden=1),
    options(2, variant="pipelined", routing="uniform", partitions=5),
    options(3, variant="balanced", routing="uniform", tokens=1, topk=1),
    options(3, variant="reduce", routing="zipf", hidden=97, dtype="fp16"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("asked", RESIDENT, ids=lambda asked: f"{asked.ranks}-{asked.variant}-{asked.routing}")
def test_resident_ranks_give_the_bits_of_reference(tmp_path, spawner, asked):
    require_too_few_gpus(asked.ranks)
    report = run(asked, tmp_path, spawner=spawner)
    report.raise_for_error()
    assert report.placement == f"{asked.ranks} ranks resident on one GPU"
    timeline = tracekern.load(tmp_path)
    assert_one_clock(timeline.ranks)
    assert {rank.clock.hard_ns for rank in timeline.ranks} == {0.0}
    assert all(rank.metadata["note"].startswith("ranks resident on one GPU") for rank in timeline.ranks)
    assert not [problem for problem in timeline.problems if problem.kind != "dense_probes"]
    assert len(timeline.flows) > (1000 if asked.ranks == 8 else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_capture_of_gpus_merges_without_a_doubt(tmp_path, spawner, ranks):
    """On a GPU each, and where there are fewer, 8 resident ranks."""
    asked = options(ranks, iterations=20)
    require_gpus(1 if ranks == 8 else ranks)
    report = run(asked, tmp_path, spawner=spawner)
    report.raise_for_error()
    timeline = tracekern.load(tmp_path)
    # The kernels are as short as the test wants them: probes may be a few percent of them.
    assert not [problem for problem in timeline.problems if problem.kind != "dense_probes"]
    assert len(timeline.flows) > 1000
    assert all(rank.backend == "cuda" and rank.resolution_ticks == 32 for rank in timeline.ranks)
    most_ns = 0 if report.placement else 5000
    assert all(rank.clock.hard_ns <= most_ns for rank in timeline.ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["balanced", "pipelined"])
def test_the_report_names_the_resident_rank_that_is_late(tmp_path, spawner, variant):
    asked = options(8, variant=variant, routing="uniform", uneven=False, late_rank=5, late_us=500)
    require_too_few_gpus()
    run(asked, tmp_path, spawner=spawner).raise_for_error()
    assert analyze(tracekern.load(tmp_path)).answer.costs[0].candidate.rank == 5


@pytest.mark.gpu
def test_ranks_without_room_beside_each_other_take_turns(tmp_path, spawner):
    asked = options(8, variant="balanced", routing="zipf", blocks=64, warps=16)
    require_too_few_gpus()
    report = run(asked, tmp_path, spawner=spawner)
    report.raise_for_error()
    told = (
        r"the ranks cannot be resident on one GPU, so they take turns: rank 0: \w+: 8 ranks of 64 blocks of 16 warps; "
    )
    assert re.match(told, report.placement)
    ranks = tracekern.load(tmp_path).ranks
    assert_one_clock(ranks)
    assert all(rank.metadata["note"].startswith("ranks share GPUs") for rank in ranks)


@pytest.mark.gpu
def test_the_kernels_of_torch_profiler_hold_what_was_recorded_in_them(tmp_path):
    asked = options(1, variant="pipelined", torch_profiler=True)
    require_gpus(1)
    run(asked, tmp_path).raise_for_error()
    timeline = tracekern.load(tmp_path)
    spans, names = timeline.spans, timeline.host_names
    streams = [index for index, track in enumerate(timeline.tracks) if track.name.startswith("torch stream")]
    of_torch = np.isin(spans.track, streams)
    ours = of_torch & np.array(["P2PDispatchCombine<" in name for name in names])[spans.begin_payload * of_torch]
    kernels = sorted(zip(spans.start[ours].tolist(), spans.end[ours].tolist(), strict=True))
    assert len(kernels) == SHAPE["iterations"]
    bound = timeline.ranks[0].clock.host_hard_ns
    for launch, (start, end) in zip(
        [index for index, launch in enumerate(timeline.launches) if launch.name == STAGES["pipelined"][0]],
        kernels,
        strict=True,
    ):
        inside = spans.launch == launch
        assert start - bound <= spans.start[inside].min() <= spans.end[inside].max() <= end + bound


@pytest.mark.gpu
def test_auto_takes_the_gpu_and_its_capture_tells_what_a_span_costs(tmp_path):
    require_gpus(1)
    run(options(1, backend="auto"), tmp_path).raise_for_error()
    about = read_dump(tmp_path / "rank_00000.tkdump").metadata
    assert about["backend"] == "cuda"
    assert sorted(map(int, about["overhead_ns"])) == list(WARPS_PER_SM)
    assert all(cost > 0 for cost in about["overhead_ns"].values())


@pytest.mark.gpu
@pytest.mark.parametrize("sink", ["host", "device"])
@pytest.mark.parametrize("record_format", ["span", "ring", "cycles"])
def test_a_span_costs_something_on_a_gpu(record_format, sink):
    require_gpus(1)
    cost = measure_span("cuda", record_format, 4, sink)
    assert cost.low_ns <= cost.span_ns <= cost.high_ns
    assert cost.region_ns > 0
    assert cost.span_ns > 0


@pytest.mark.gpu
def test_a_grid_that_the_gpu_cannot_hold_at_once_is_refused():
    require_gpus(1)
    shape = MoeShape(1, 16, 8, 4, 256, "bf16")
    with pytest.raises(
        BadInput, match=r"rank 0: dispatch_send: 4096 blocks of 16 warps; the device holds \d+ at once;"
    ):
        P2PPipeline(Group(0, 1), shape, "balanced", backend="cuda", num_blocks=4096, warps_per_block=16)


@pytest.mark.gpu
def test_kernels_leave_some_sms_to_others():
    require_gpus(1)
    shape = MoeShape(1, 16, 8, 4, 256, "bf16")
    present = torch.cuda.get_device_properties().multi_processor_count
    assert P2PPipeline(Group(0, 1), shape, "reduce", backend="cuda").grid == present - SPARE_SMS
    assert P2PPipeline(Group(0, 1), shape, "reduce", backend="cuda", num_sms=9).grid == 9
    with pytest.raises(BadInput, match=f"num_sms is {present + 1}; wanted 0 to {present}"):
        P2PPipeline(Group(0, 1), shape, "reduce", backend="cuda", num_sms=present + 1)
    with pytest.raises(BadInput, match="num_sms is 9 and num_blocks 4; a block fills an SM: give one of them"):
        P2PPipeline(Group(0, 1), shape, "reduce", backend="cuda", num_sms=9, num_blocks=4)


@pytest.mark.gpu
def test_a_capture_gives_its_device_memory_back(tmp_path):
    require_gpus(1)
    pipeline, tensors = one_rank()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(2):
        with capture(tmp_path, device=pipeline.comm.device, sink="device", max_bytes=1 << 29) as session:
            pipeline(*tensors, capture=session)
            pipeline.synchronize()
            assert before - torch.cuda.mem_get_info()[0] >= 1 << 29
    assert before - torch.cuda.mem_get_info()[0] < 1 << 26
    assert len(tracekern.load(tmp_path).spans) > 0


@pytest.mark.gpu
def test_a_full_gpu_leaves_records_in_host_memory(tmp_path, caplog):
    require_gpus(1)
    pipeline, tensors = one_rank()
    filler = torch.empty(torch.cuda.mem_get_info()[0] - (128 << 20), dtype=torch.uint8, device="cuda")
    with (
        pytest.raises(
            BadInput, match="sink='device': device memory for records: .*; lower max_bytes; take sink='host'"
        ),
        capture(tmp_path, device=pipeline.comm.device, sink="device", max_bytes=1 << 29),
    ):
        pass
    with capture(tmp_path, device=pipeline.comm.device, max_bytes=1 << 29) as session:
        with session.counting():
            pipeline(*tensors, capture=session)
            pipeline.synchronize()
        pipeline(*tensors, capture=session)
        pipeline.synchronize()
    del filler
    torch.cuda.empty_cache()
    assert "records stay in host memory: device memory for records" in caplog.text
    assert set(sum(read_dump(tmp_path / "rank_00000.tkdump").metadata["sinks"].values(), [])) == {"host"}
    assert len(tracekern.load(tmp_path).spans) > 0
