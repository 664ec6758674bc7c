"""Opening GPUs that turn out not to serve, which no facts told beforehand: one line, the same on all ranks."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest
import torch
from rank_pool import RankPool

from tracekern.comm.devices.cuda import open_cuda
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.workload import worker
from tracekern.moe.workload.options import MoeRun
from tracekern.record.overhead import find_device
from tracekern.record.session import capture

GIB = 1 << 30


def stand_in(rank: int, fails: str) -> types.ModuleType:
    """In the place of tracekern._cuda: sound GPUs, until rank 1 allocates or maps."""

    class CudaCommunicator:
        def __init__(self, *_: Any) -> None:
            if rank == 1 and fails == "allocation":
                raise RuntimeError("cuMemCreate: out of memory")

        def export_heap(self) -> int:
            return os.memfd_create("heap")

        def import_peer(self, peer: int, descriptor: int) -> None:
            if rank == 1 and fails == "mapping":
                raise RuntimeError("cuMemSetAccess: invalid device ordinal")

        def heap_handle(self) -> bytes:
            return bytes([rank] * 64)

        def open_peer(self, peer: int, handle: bytes) -> None:
            if rank == 1 and fails == "opening":
                raise RuntimeError(f"cudaIpcOpenMemHandle: {len(handle)} bytes of rank {handle[0]}: invalid argument")

    module: Any = types.ModuleType("tracekern._cuda")
    module.CudaCommunicator = CudaCommunicator
    module.driver_versions = lambda: (13000, 13000)
    sizes = {"free_bytes": GIB, "total_bytes": 2 * GIB}
    exports = fails != "opening" or rank == 1  # one rank that cannot is enough
    module.device_facts = lambda: {"name": "GPU", "bus_id": f"{rank}", "exports_memory": exports, **sizes}
    return module  # type: ignore[no-any-return]


def refused(group: Group, fails: str) -> tuple[str, int]:
    """What open_cuda() said on this rank, and how many file descriptors it left open."""
    sys.modules["tracekern._cuda"] = stand_in(group.rank, fails)
    before = len(os.listdir("/proc/self/fd"))
    try:
        open_cuda(group, GIB // 2, 1.0)
    except BadInput as error:
        return str(error), len(os.listdir("/proc/self/fd")) - before
    finally:
        del sys.modules["tracekern._cuda"]
    return "", 0


@pytest.mark.parametrize(
    ("fails", "line"),
    [
        (
            "allocation",
            "rank 1: the symmetric heap wants 512.0 MiB, 1.0 GiB of 2.0 GiB are free on GPU 1; make the shape smaller, "
            "or end what fills it",
        ),
        (
            "mapping",
            "rank 1: its GPU cannot map the memory of rank 0's: cuMemSetAccess: invalid device ordinal; see "
            "`nvidia-smi topo -p2p rw`",
        ),
        (
            "opening",
            "rank 1: its GPU cannot map the memory of rank 0's: cudaIpcOpenMemHandle: 64 bytes of rank 0: invalid "
            "argument; see `nvidia-smi topo -p2p rw`",
        ),
    ],
)
def test_what_fails_on_one_rank_is_refused_on_all(fails, line):
    pool = RankPool(2)
    try:
        assert pool.call(refused, fails) == [(line, 0)] * 2
    finally:
        pool.close()


def test_without_kernels_for_gpus_one_line_says_so(tmp_path):
    try:
        import tracekern._cuda  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("they were built here")
    with pytest.raises(BadInput, match="^tracekern was installed without its kernels for GPUs; .*; or take the CPU"):
        open_cuda(Group(0, 1), GIB, 1.0)
    with pytest.raises(BadInput, match="^tracekern was installed"), capture(tmp_path / "capture", device="cuda"):
        pass


def test_amd_gpus_are_none_that_kernels_can_be_started_on(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert worker._choose_backend(MoeRun(ranks=8)) == "cpu"
    assert find_device("auto")[0] == "cpu"
    only_compiled = "this torch is for AMD GPUs, for which kernels are only compiled so far; take "
    with pytest.raises(BadInput, match=f"^{only_compiled}the backend cpu"):
        worker._choose_backend(MoeRun(ranks=8, backend="cuda"))
    with pytest.raises(BadInput, match=f"^backend cuda: {only_compiled}cpu"):
        find_device("cuda")
    with (
        pytest.raises(BadInput, match=f"^{only_compiled}the CPU backend"),
        capture(tmp_path / "capture", device="cuda"),
    ):
        pass
