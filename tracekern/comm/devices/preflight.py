"""Checks, before kernels of several GPUs wait for each other, whether the GPUs can: takes facts, gives a verdict.

Each line of a verdict says what is wrong and what to do. tracekern/comm/devices/cuda.py collects the facts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from tracekern.comm import heap as symmetric_heap
from tracekern.errors import packages_for
from tracekern.formatting import size


@dataclass(frozen=True)
class GpuFacts:
    """Facts of one rank's GPU. Versions are CUDA's numbers: 1000 * major + 10 * minor."""

    node: str
    """Name of its host."""
    reach: str
    """Equal for ranks that can hand each other memory."""
    heap_bytes: int
    """Size of this rank's part of the symmetric heap."""
    driver_version: int
    runtime_version: int
    name: str = ""
    bus_id: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    has_mps: bool = False
    is_resident: bool = False
    """Whether this is a resident rank (tracekern.comm.ranks.resident); then all are, on one GPU."""
    exports_memory: bool = True
    """Whether memory can be exported by file descriptor; if not, the heap is shared by CUDA IPC."""
    reachable: Mapping[str, bool] = field(default_factory=dict)
    """Bus id -> whether this GPU can map that one's memory. Holds only GPUs that the process sees."""
    profiler: str = ""
    """Name of an attached profiler that replays kernels; "" for none."""
    error: str = ""
    """Why the other facts are missing; "" if they are not."""

    @property
    def is_mig(self) -> bool:
        return " MIG " in self.name


@dataclass(frozen=True)
class Preflight:
    refusal: str = ""
    warnings: tuple[str, ...] = ()
    note: str = ""
    """A caveat for all recorded durations; "" for none."""


def find_profiler(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the name of an attached tool that replays or serializes kernels, or "".

    A tool is recognized by the variables that it sets for its target.
    """
    for variable, tool in (
        ("NV_COMPUTE_PROFILER_PERFWORKS_DIR", "Nsight Compute"),
        ("NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN", "Compute Sanitizer"),
    ):
        if variable in environment:
            return tool
    return ""


def why_no_gpu() -> str:
    """Returns one line with the reason; "" if torch sees GPUs that can run the kernels."""
    with packages_for("looking for GPUs"):
        import torch

    return why_only_compiled() or ("" if torch.cuda.device_count() else "torch finds no GPU here")


def why_only_compiled() -> str:
    """Returns one line if torch is built for AMD GPUs, which it presents under the names of CUDA; else ""."""
    with packages_for("looking for GPUs"):
        import torch

    is_rocm = torch.version.hip is not None
    return "this torch is for AMD GPUs, for which kernels are only compiled so far" if is_rocm else ""


def judge(facts: Mapping[int, GpuFacts]) -> Preflight:
    """Returns the verdict, which is the same on every rank. facts: of all, by the run's rank."""
    offers = [symmetric_heap.Offer(own.node, own.reach, own.heap_bytes) for own in facts.values()]
    refusals = (
        _old_driver(facts),
        *(f"rank {rank}: {own.error}" for rank, own in facts.items() if own.error),
        symmetric_heap.refusal(offers, tuple(facts)),
        _different(facts),
        _cannot_share(facts),
        _out_of_memory(facts),
    )
    return Preflight(next((text for text in refusals if text), ""), tuple(_warnings(facts)), _note(facts))


def _note(facts: Mapping[int, GpuFacts]) -> str:
    if _first(facts).is_resident:
        # Without their number: these may be a group of those that share the GPU.
        return "ranks resident on one GPU: they share its SMs and memory, and nothing crosses a link"
    return "ranks share GPUs and take turns: order and coverage, never GPU durations" if _shared(facts) else ""


def _old_driver(facts: Mapping[int, GpuFacts]) -> str:
    for rank, own in facts.items():
        # An older driver supports a newer runtime of the same major version only.
        if own.driver_version // 1000 < own.runtime_version // 1000:
            serves = f"serves CUDA {_version(own.driver_version)}" if own.driver_version else "is missing"
            return (
                f"rank {rank}: the driver {serves}, this build needs {own.runtime_version // 1000}.0; update the "
                "driver, or build tracekern with an older CUDA toolkit"
            )
    return ""


def _different(facts: Mapping[int, GpuFacts]) -> str:
    first = _first(facts)
    for rank, own in facts.items():
        if own.name != first.name:
            both = f"rank {next(iter(facts))} has a {first.name}, rank {rank} a {own.name}"
            return f"{both}; these kernels want equal GPUs: choose them with CUDA_VISIBLE_DEVICES"
    return ""


def _cannot_share(facts: Mapping[int, GpuFacts]) -> str:
    for rank, own in facts.items():
        if len(facts) > 1 and own.is_mig:
            return f"rank {rank} has a MIG slice ({own.name}), which no peer reaches; run `nvidia-smi -mig 0`"
        for peer, theirs in facts.items():
            if own.bus_id != theirs.bus_id and not own.reachable.get(theirs.bus_id, True):
                return (
                    f"rank {rank}: GPU {own.bus_id} cannot reach rank {peer}'s GPU {theirs.bus_id}; see "
                    "`nvidia-smi topo -p2p rw`, and choose GPUs that can"
                )
    return ""


def _shared(facts: Mapping[int, GpuFacts]) -> dict[str, list[int]]:
    """Returns, by bus id, the ranks of each GPU that several ranks use."""
    ranks_of: dict[str, list[int]] = {}
    for rank, own in facts.items():
        ranks_of.setdefault(own.bus_id, []).append(rank)
    return {bus_id: ranks for bus_id, ranks in ranks_of.items() if len(ranks) > 1 and bus_id}


def _out_of_memory(facts: Mapping[int, GpuFacts]) -> str:
    shared = _shared(facts)
    for rank, own in facts.items():
        num_heaps = len(shared.get(own.bus_id, [rank]))
        if num_heaps * own.heap_bytes > own.free_bytes:
            return out_of_memory(rank, own, num_heaps)
    return ""


def out_of_memory(rank: int, own: GpuFacts, num_heaps: int = 1) -> str:
    """Returns one line that says which heaps find no room on this rank's GPU."""
    heap = f"the symmetric heap wants {size(own.heap_bytes)}"
    heaps = f"the symmetric heaps of {num_heaps} ranks want {size(own.heap_bytes)} each"
    return (
        f"rank {rank}: {heap if num_heaps == 1 else heaps}, {size(own.free_bytes)} of "
        f"{size(own.total_bytes)} are free on {own.name} {own.bus_id}; make the shape smaller, or end what fills it"
    )


def _warnings(facts: Mapping[int, GpuFacts]) -> list[str]:
    warnings = [
        f"ranks {', '.join(map(str, ranks))} share GPU {bus_id}: kernels that wait for each other take turns on it"
        for bus_id, ranks in _shared(facts).items()
        if not _first(facts).is_resident
    ]
    if _any(facts, "has_mps"):
        warnings.append(
            f"MPS serves the GPU of rank {_any(facts, 'has_mps')[0]}: other processes may take the room that kernels "
            "which wait for each other need; stop it with `echo quit | nvidia-cuda-mps-control`"
        )
    profiled = _any(facts, "profiler")
    if profiled:
        tool = facts[profiled[0]].profiler
        what = {
            "Nsight Compute": "runs kernels again, one at a time, and one that waits for another rank waits in vain; "
            "use nsys, or ncu on the kernels that do not wait",
            "Compute Sanitizer": "makes kernels many times slower; raise timeout_s",
        }[tool]
        warnings.append(f"{tool} is attached to rank {profiled[0]}: it {what}")
    return warnings


def _first(facts: Mapping[int, GpuFacts]) -> GpuFacts:
    return next(iter(facts.values()))


def _any(facts: Mapping[int, GpuFacts], key: str) -> list[int]:
    return [rank for rank, own in facts.items() if getattr(own, key)]


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
