"""Tensors that users allocate in the symmetric heap: one place on all ranks, seen by all, refused together."""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankPool

from tests.devices import require_gpus
from tracekern.comm.communicator import Communicator
from tracekern.comm.devices.this_thread import rank_of_thread
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput, CommTimeout
from tracekern.launcher.resident import run_residents
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.shape import MoeShape

HEAP_BYTES = 1 << 16
CONTROL_BYTES = 4096
NUM_RANKS = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(NUM_RANKS)
    yield ranks
    ranks.close()


def alone(num_bytes: int = HEAP_BYTES, **options: Any) -> Communicator:
    return Communicator(Group(0, 1), num_bytes, 1.0, **options)


def write_to_all(group: Group, backend: str) -> dict[str, Any]:
    """Every rank writes a row in every rank's copy; returns what this one then finds in its own."""
    if backend == "cuda" and group.num_residents == 1:
        torch.cuda.set_device(group.rank)
    comm = Communicator(group, HEAP_BYTES, 20.0, backend)
    comm.malloc_symmetric((5,), torch.int8)
    rows = comm.malloc_symmetric((group.num_ranks, 3), torch.float32)
    was_zero = not rows.local.any()
    group.barrier()  # the first to write must not be faster than the last to look
    for peer in range(group.num_ranks):
        rows.peer(peer)[group.rank] = torch.tensor([group.rank, peer, 0.5])
    comm.synchronize()
    comm.barrier()
    found = rows.local.tolist()
    theirs = [rows.peer(peer).tolist() for peer in range(group.num_ranks)]
    devices = {str(rows.peer(peer).device) for peer in range(group.num_ranks)}
    comm.barrier()
    addresses = [rows.peer(peer).data_ptr() for peer in range(group.num_ranks)]
    return {
        "offset": rows.offset,
        "was_zero": was_zero,
        "found": found,
        "theirs": theirs,
        "at_home": devices == {comm.device.torch_device} == {str(rows.local.device)},
        "addresses": addresses == list(rows.pointers) and rows.pointers[group.rank] == rows.local.data_ptr(),
    }


def check_written(answers: list[dict[str, Any]]) -> None:
    ranks = range(len(answers))
    written = [[[float(writer), float(owner), 0.5] for writer in ranks] for owner in ranks]
    for rank, answer in enumerate(answers):
        assert answer["offset"] == CONTROL_BYTES + 128
        assert answer["found"] == written[rank]
        assert answer["theirs"] == written
        assert answer["was_zero"]
        assert answer["at_home"]
        assert answer["addresses"]


def test_what_a_rank_writes_its_peers_see(pool: RankPool):
    check_written(pool.call(write_to_all, "cpu"))


def on_residents(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """[num_ranks] results of function(group, *args) on resident ranks of this process."""
    results: list[Any] = [None] * num_ranks

    def run() -> None:
        results[rank_of_thread()] = function(Group.discover(), *args)

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # run_residents() would leave it to later tests
        assert run_residents(num_ranks, run) == 0
    return results


def test_what_a_resident_rank_writes_its_peers_see():
    check_written(on_residents(3, write_to_all, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_what_a_rank_writes_its_peers_see_on_gpus(num_ranks: int):
    """On a GPU each these write into each other's memory; with fewer GPUs than ranks all are resident on one."""
    require_gpus(1)
    if torch.cuda.device_count() < num_ranks:
        check_written(on_residents(num_ranks, write_to_all, "cuda"))
        return
    ranks = RankPool(num_ranks)
    try:
        check_written(ranks.call(write_to_all, "cuda"))
    finally:
        ranks.close()


@pytest.mark.gpu
def test_a_tensor_of_a_gpu_outlives_its_communicator():
    require_gpus(1)
    comm = alone(backend="cuda")
    tensor = comm.malloc_symmetric((2, 3), torch.bfloat16).local
    del comm
    gc.collect()
    assert tensor.fill_(1.5).sum().item() == 9.0


def test_tensors_lie_on_lines_behind_one_another():
    comm = alone()
    offsets = [comm.malloc_symmetric(shape, torch.float16).offset for shape in [(1,), (64,), (65,), (2, 3, 4), ()]]
    assert [offset - CONTROL_BYTES for offset in offsets] == [0, 128, 256, 512, 640]


@pytest.mark.parametrize(
    "dtype",
    sorted(
        {torch.bool, torch.uint8, torch.int64, torch.float64, torch.complex64, torch.bfloat16, torch.float8_e4m3fn},
        key=str,
    ),
    ids=str,
)
def test_dtypes(dtype: torch.dtype):
    tensor = alone().malloc_symmetric([3, 5], dtype)
    assert (tensor.shape, tensor.dtype) == ((3, 5), dtype)
    assert (tuple(tensor.local.shape), tensor.local.dtype) == ((3, 5), dtype)
    tensor.local[2, 4] = 1
    assert tensor.peer(0).view(torch.uint8).any()
    assert tensor.local.is_contiguous()


@pytest.mark.parametrize("shape", [(0,), (4, 0, 2), (0, 1 << 40)])
def test_a_tensor_without_elements_takes_no_room(shape: tuple[int, ...]):
    comm = alone(CONTROL_BYTES + 8)
    comm.malloc_symmetric((1,), torch.int64)
    for _ in range(2):
        tensor = comm.malloc_symmetric(shape, torch.int64)
        assert tuple(tensor.local.shape) == shape
        assert tensor.offset == CONTROL_BYTES + 8


WRONG: list[tuple[Any, Any, str]] = [
    (8, torch.int8, "shape is 8; wanted a sequence of sizes from 0 on, such as (4, 128)"),
    ("8", torch.int8, "shape is '8'; wanted a sequence of sizes from 0 on, such as (4, 128)"),
    ((2, -1), torch.int8, "shape is (2, -1); wanted a sequence of sizes from 0 on, such as (4, 128)"),
    ((2.5,), torch.int8, "shape is (2.5,); wanted a sequence of sizes from 0 on, such as (4, 128)"),
    ((0, 1 << 63), torch.int8, f"shape is (0, {1 << 63}); wanted a sequence of sizes from 0 on, such as (4, 128)"),
    (None, torch.int8, "shape is None; wanted a sequence of sizes from 0 on, such as (4, 128)"),
    ((8,), "int8", "dtype is 'int8'; wanted one of torch, such as torch.bfloat16"),
    ((8,), np.int8, "dtype is <class 'numpy.int8'>; wanted one of torch, such as torch.bfloat16"),
]


@pytest.mark.parametrize(("shape", "dtype", "line"), WRONG, ids=[str(case[:2]) for case in WRONG])
def test_what_is_no_tensor_is_refused(shape: Any, dtype: Any, line: str):
    with pytest.raises(BadInput, match=re.escape(f"malloc_symmetric on rank 0: {line}")):
        alone().malloc_symmetric(shape, dtype)


def test_what_is_no_rank_is_refused():
    tensor = alone().malloc_symmetric((1,), torch.int8)
    for rank in (1, -1, None):
        with pytest.raises(BadInput, match=re.escape(f"peer({rank}): wanted a rank from 0 to 0")):
            tensor.peer(rank)


def test_what_does_not_fit_is_refused_and_what_is_wanted_does():
    line = "malloc_symmetric: [100, 100] torch.int64 takes 80000 bytes, 61312 of the heap's 65536 are left; "
    comm = alone()
    comm.malloc_symmetric((1,), torch.int64)
    with pytest.raises(BadInput, match=re.escape(line + "make a Communicator with num_bytes=84224 or more")):
        comm.malloc_symmetric((100, 100), torch.int64)
    assert comm.malloc_symmetric((61312,), torch.uint8).offset == CONTROL_BYTES + 128
    with pytest.raises(BadInput, match="takes 1 bytes, 0 of the heap's 65536 are left"):
        comm.malloc_symmetric((1,), torch.uint8)
    larger = alone(84224)
    larger.malloc_symmetric((1,), torch.int64)
    assert larger.malloc_symmetric((100, 100), torch.int64).local.fill_(7).sum() == 70000


def test_what_kernels_address_by_themselves_is_not_handed_out():
    comm = alone(reserved_bytes=CONTROL_BYTES + 1000)
    assert comm.malloc_symmetric((1,), torch.int8).offset == CONTROL_BYTES + 1024
    for wrong in (-1, HEAP_BYTES + 1, 4096.5):
        line = f"reserved_bytes is {wrong}; wanted 0 to num_bytes, which is {HEAP_BYTES}"
        with pytest.raises(BadInput, match=line):
            alone(reserved_bytes=wrong)


def test_the_heap_of_a_pipeline_is_all_its_own():
    shape = MoeShape(num_ranks=1, max_tokens=4, num_experts=2, topk=1, hidden=64, dtype="fp32")
    pipeline = P2PPipeline(Group(0, 1), shape, "balanced")
    with pytest.raises(BadInput, match="takes 1 bytes, 0 of the heap's [0-9]+ are left"):
        pipeline.comm.malloc_symmetric((1,), torch.int8)


def ask_differently(group: Group, asks: list[tuple[Any, Any]]) -> list[Any]:
    """Rank r asks for asks[r]; then all ask for the same. Returns what was said, and where the same then lies."""
    comm = Communicator(group, HEAP_BYTES, 20.0)
    said: list[Any] = []
    try:
        comm.malloc_symmetric(*asks[group.rank])
    except BadInput as error:
        said.append(str(error))
    return [*said, comm.malloc_symmetric((4,), torch.int32).offset]


DIFFERENT = {
    "shape": (
        [((4, 128), torch.float32)] * 2 + [((7, 128), torch.float32)],
        "malloc_symmetric: rank 0 asks for [4, 128] torch.float32, rank 2 for [7, 128] torch.float32; all ranks must "
        "ask for the same tensors in the same order",
    ),
    "as many bytes": (
        [((4,), torch.float32), ((4,), torch.int32), ((4,), torch.float32)],
        "malloc_symmetric: rank 0 asks for [4] torch.float32, rank 1 for [4] torch.int32; all ranks must ask for the "
        "same tensors in the same order",
    ),
    "one in vain": (
        [((4,), torch.float32), ((4,), torch.float32), (4, torch.float32)],
        "malloc_symmetric on rank 2: shape is 4; wanted a sequence of sizes from 0 on, such as (4, 128)",
    ),
    "too much": (
        [((1 << 20,), torch.int8)] * 3,
        "malloc_symmetric: [1048576] torch.int8 takes 1048576 bytes, 61440 of the heap's 65536 are left; make a "
        "Communicator with num_bytes=1052672 or more",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_all_ranks_refuse_what_one_refuses_and_go_on(pool: RankPool, case: str):
    asks, line = DIFFERENT[case]
    assert pool.call(ask_differently, asks) == [[line, CONTROL_BYTES]] * NUM_RANKS


def reserve_differently(group: Group) -> str:
    comm = Communicator(group, HEAP_BYTES, 20.0, reserved_bytes=8192 if group.rank == 1 else 0)
    try:
        comm.malloc_symmetric((4,), torch.int32)
    except BadInput as error:
        return str(error)
    return ""


def test_ranks_that_reserve_differently_are_told(pool: RankPool):
    line = (
        "malloc_symmetric: the heap of rank 0 is free from 4096 bytes on, that of rank 1 from 8192; make the "
        "Communicator with the same reserved_bytes on all ranks"
    )
    assert pool.call(reserve_differently) == [line] * NUM_RANKS


def outlive(group: Group) -> list[int]:
    """Values of all ranks, read after the communicator and the group's other objects are gone."""
    comm = Communicator(group, HEAP_BYTES, 20.0)
    tensor = comm.malloc_symmetric((2,), torch.int64)
    local, peers = tensor.local, [tensor.peer(rank) for rank in range(group.num_ranks)]
    del comm, tensor
    gc.collect()
    local[1] = 10 + group.rank
    group.barrier()
    values = [int(peer[1]) for peer in peers]
    group.barrier()
    return values


def test_tensors_outlive_their_communicator(pool: RankPool):
    assert pool.call(outlive) == [[10, 11, 12]] * NUM_RANKS


def mapped_heaps() -> int:
    """Parts of symmetric heaps that this process maps: deleted files of /dev/shm, of that size."""
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if "/dev/shm/#" in line]
    return sum(int(stop, 16) - int(start, 16) == HEAP_BYTES for start, stop in spans)


def test_the_heap_goes_with_the_last_tensor():
    gc.collect()
    before = mapped_heaps()
    holders: list[Callable[[Communicator], Any]] = [
        lambda comm: comm.malloc_symmetric((2,), torch.int64),
        lambda comm: comm.malloc_symmetric((2,), torch.int64).local,
        lambda comm: comm.malloc_symmetric((2,), torch.int64).peer(0)[1:],
    ]
    for make in holders:
        held = make(alone())
        gc.collect()
        assert mapped_heaps() == before + 1
        del held
        gc.collect()
        assert mapped_heaps() == before


def time_out_and_ask(group: Group) -> tuple[list[int], int]:
    comm = Communicator(group, HEAP_BYTES, 0.3)
    kept = comm.malloc_symmetric((2,), torch.int64)
    kept.local[:] = 5
    if group.rank == 0:
        with pytest.raises(CommTimeout):
            comm.barrier()
    group.barrier()
    offset = comm.malloc_symmetric((2,), torch.int64).offset
    comm.reset()
    comm.barrier()
    return kept.local.tolist(), offset


def test_a_time_out_and_a_reset_leave_tensors_as_they_are(pool: RankPool):
    assert pool.call(time_out_and_ask) == [([5, 5], CONTROL_BYTES + 128)] * NUM_RANKS


def test_random_tensors_never_overlap():
    draw = np.random.default_rng(1)
    comm = alone(1 << 20)
    dtypes = [torch.int8, torch.bfloat16, torch.int32, torch.complex128]
    tensors = []
    for number in range(60):
        shape = draw.integers(0, 7, draw.integers(0, 4)).tolist()
        tensor = comm.malloc_symmetric(shape, dtypes[number % len(dtypes)])
        assert tensor.offset % 128 == 0
        tensor.local.view(-1).view(torch.uint8).fill_(number)
        tensors.append(tensor)
    for number, tensor in enumerate(tensors):
        assert (tensor.local.view(-1).view(torch.uint8) == number).all()
    assert all(first.offset <= second.offset for first, second in itertools.pairwise(tensors))


def test_ranks_without_a_process_group_are_told_at_once():
    with pytest.raises(BadInput, match=r"2 ranks that torch.distributed does not connect; call .*init_process_group"):
        Communicator(Group(0, 2), 1 << 16, timeout_s=1.0)
