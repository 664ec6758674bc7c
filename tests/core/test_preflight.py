"""What is refused, or warned of, before kernels of several GPUs wait for each other: facts in, one line out."""

from __future__ import annotations

import dataclasses

import pytest

from tests.toolchains import CSRC
from tracekern.comm.devices.preflight import GpuFacts, find_profiler, judge
from tracekern.comm.heap import Offer, refusal
from tracekern.comm.ranks.group import MAX_HEAP_RANKS

GIB = 1 << 30
SOUND = GpuFacts(
    node="host",
    reach="host",
    heap_bytes=4 * GIB,
    driver_version=13000,
    runtime_version=13000,
    name="NVIDIA H200",
    free_bytes=130 * GIB,
    total_bytes=140 * GIB,
)


def by_rank(facts: list[GpuFacts]) -> dict[int, GpuFacts]:
    return dict(enumerate(facts))


def ranks(count: int, **changes_of_rank_1: object) -> list[GpuFacts]:
    """Sound ranks, each with a GPU of its own that reaches all others; rank 1 is changed."""
    bus_ids = [f"0000:{rank:02X}:00.0" for rank in range(count)]
    facts = [
        dataclasses.replace(SOUND, bus_id=own, reachable={other: True for other in bus_ids if other != own})
        for own in bus_ids
    ]
    facts[1:2] = [dataclasses.replace(fact, **changes_of_rank_1) for fact in facts[1:2]]
    return facts


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"driver_version": 12080}, "rank 1: the driver serves CUDA 12.8, this build needs 13.0"),
        ({"driver_version": 0, "error": "cudaGetDeviceCount: none"}, "rank 1: the driver is missing"),
        ({"error": "cudaGetDevice: out of order"}, "rank 1: cudaGetDevice: out of order"),
        ({"node": "other", "reach": "other"}, "symmetric heap: rank 0 is on host, rank 1 on other"),
        ({"reach": "other"}, "rank 1 on another machine or in a container with a network of its own"),
        ({"heap_bytes": 8 * GIB}, "rank 0 asks for 4294967296 bytes, rank 1 for 8589934592"),
        ({"name": "NVIDIA H100 80GB HBM3"}, "rank 0 has a NVIDIA H200, rank 1 a NVIDIA H100 80GB HBM3"),
        ({"reachable": {"0000:00:00.0": False}}, "GPU 0000:01:00.0 cannot reach rank 0's GPU 0000:00:00.0"),
        ({"free_bytes": 3 * GIB}, "rank 1: the symmetric heap wants 4.0 GiB, 3.0 GiB of 140.0 GiB are free"),
    ],
)
def test_what_cannot_work_is_refused(changes, refusal):
    verdict = judge(by_rank(ranks(2, **changes)))
    assert refusal in verdict.refusal
    assert "\n" not in verdict.refusal


def test_ranks_of_a_group_are_named_as_the_run_does():
    facts = dict(zip((3, 7), ranks(2, driver_version=0, error="none"), strict=True))
    assert judge(facts).refusal.startswith("rank 7: the driver is missing")
    facts = dict(zip((3, 7), ranks(2, name="NVIDIA H100 80GB HBM3"), strict=True))
    assert judge(facts).refusal.startswith("rank 3 has a NVIDIA H200, rank 7 a NVIDIA H100 80GB HBM3")


def test_a_mig_slice_works_alone():
    name = "NVIDIA H200 MIG 1g.18gb"
    alone, together = ([dataclasses.replace(fact, name=name) for fact in ranks(count)] for count in (1, 2))
    assert judge(by_rank(alone)).refusal == ""
    wanted = f"rank 0 has a MIG slice ({name}), which no peer reaches; run `nvidia-smi -mig 0`"
    assert judge(by_rank(together)).refusal == wanted


def test_more_ranks_than_the_kernels_have_room_for_are_refused():
    """Their table of heaps has 64 places; the 65th rank wrote behind it."""
    kernels = (CSRC / "comm" / "heap.h").read_text()
    assert f"constexpr uint32_t kMaxRanks = {MAX_HEAP_RANKS};" in kernels
    assert judge(by_rank(ranks(MAX_HEAP_RANKS))).refusal == ""
    told = f"symmetric heap: {MAX_HEAP_RANKS + 1} ranks, wanted at most {MAX_HEAP_RANKS}; start fewer"
    assert judge(by_rank(ranks(MAX_HEAP_RANKS + 1))).refusal == told
    assert refusal([Offer("host", "host", 1)] * (MAX_HEAP_RANKS + 1), range(MAX_HEAP_RANKS + 1)) == told


def test_an_older_driver_of_the_same_major_version_serves():
    facts = [dataclasses.replace(SOUND, driver_version=12020, runtime_version=12080)]
    assert judge(by_rank(facts)).refusal == ""


def test_a_gpu_that_the_process_does_not_see_may_be_reachable():
    assert judge(by_rank(ranks(2, reachable={}))).refusal == ""


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"has_mps": True}, "MPS serves the GPU of rank 1"),
        ({"profiler": "Nsight Compute"}, "Nsight Compute is attached to rank 1: it runs kernels again"),
        ({"profiler": "Compute Sanitizer"}, "Compute Sanitizer is attached to rank 1"),
    ],
)
def test_what_may_fail_is_warned_of(changes, warning):
    verdict = judge(by_rank(ranks(2, **changes)))
    assert verdict.refusal == ""
    (told,) = verdict.warnings
    assert told.startswith(warning)


def test_ranks_that_share_a_gpu_take_turns_and_need_room_together():
    facts = ranks(3, bus_id="0000:00:00.0")
    verdict = judge(by_rank(facts))
    assert (verdict.refusal, verdict.warnings) == (
        "",
        ("ranks 0, 1 share GPU 0000:00:00.0: kernels that wait for each other take turns on it",),
    )
    assert verdict.note == "ranks share GPUs and take turns: order and coverage, never GPU durations"
    assert judge(by_rank([dataclasses.replace(fact, free_bytes=7 * GIB) for fact in facts])).refusal == (
        "rank 0: the symmetric heaps of 2 ranks want 4.0 GiB each, 7.0 GiB of 140.0 GiB are free on NVIDIA H200 "
        "0000:00:00.0; make the shape smaller, or end what fills it"
    )
    alone = dataclasses.replace(facts[2], free_bytes=4 * GIB)
    assert judge(by_rank([*facts[:2], alone])).refusal == ""


def test_a_profiler_shows_in_the_environment():
    assert find_profiler({"PATH": "/bin"}) == ""
    assert find_profiler({"NV_COMPUTE_PROFILER_PERFWORKS_DIR": "/opt"}) == "Nsight Compute"
    assert find_profiler({"NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN": "0"}) == "Compute Sanitizer"
    assert find_profiler({"NSYS_PROFILING_SESSION_ID": "1"}) == ""  # it runs every kernel once, beside the others
