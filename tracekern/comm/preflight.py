"""What is checked before kernels of several GPUs wait for each other: facts of each rank's GPU in, a verdict out.

Each line of a verdict says what is wrong and what to do. tracekern/comm/cuda.py collects the facts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tracekern.comm import heap as symmetric_heap
from tracekern.formatting import size


@dataclass(frozen=True)
class GpuFacts:
    """One rank's GPU. Versions as CUDA counts them: 1000 * major + 10 * minor."""

    node: str
    heap_bytes: int
    """Wanted of the symmetric heap."""
    driver_version: int
    runtime_version: int
    name: str = ""
    bus_id: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    has_mps: bool = False
    exports_memory: bool = True
    """By file descriptor; if not, the heap is shared by CUDA IPC."""
    reachable: Mapping[str, bool] = field(default_factory=dict)
    """Bus id -> can this GPU map that one's memory? Only of GPUs that the process sees."""
    profiler: str = ""
    """One that replays kernels, if it is attached."""
    error: str = ""
    """Why the rest could not be found out."""

    @property
    def is_mig(self) -> bool:
        return " MIG " in self.name


@dataclass(frozen=True)
class Preflight:
    refusal: str = ""
    warnings: tuple[str, ...] = ()
    note: str = ""
    """What must be known of every duration that is recorded."""


def find_profiler(environment: Mapping[str, str] = os.environ) -> str:
    """Name of a tool that runs kernels again or one by one, or ""; by the variables that it sets for its target."""
    for variable, tool in (
        ("NV_COMPUTE_PROFILER_PERFWORKS_DIR", "Nsight Compute"),
        ("NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN", "Compute Sanitizer"),
    ):
        if variable in environment:
            return tool
    return ""


def why_no_gpu() -> str:
    """A line; "" where torch sees GPUs that kernels can be started on."""
    import torch

    return why_only_compiled() or ("" if torch.cuda.device_count() else "torch finds no GPU here")


def why_only_compiled() -> str:
    """A line where torch is one for AMD GPUs, which it finds by the names of CUDA."""
    import torch

    is_rocm = torch.version.hip is not None
    return "this torch is for AMD GPUs, for which kernels are only compiled so far" if is_rocm else ""


def judge(facts: Sequence[GpuFacts]) -> Preflight:
    """The same verdict on every rank, from the facts of all, by rank."""
    refusals = (
        _old_driver(facts),
        *(f"rank {rank}: {own.error}" for rank, own in enumerate(facts) if own.error),
        symmetric_heap.refusal([(own.node, own.heap_bytes) for own in facts]),
        _different(facts),
        _cannot_share(facts),
        _out_of_memory(facts),
    )
    note = "ranks share GPUs and take turns: order and coverage, never GPU durations" if _shared(facts) else ""
    return Preflight(next((text for text in refusals if text), ""), tuple(_warnings(facts)), note)


def _old_driver(facts: Sequence[GpuFacts]) -> str:
    for rank, own in enumerate(facts):
        # Within a major version an older driver serves a newer runtime; across one it does not.
        if own.driver_version // 1000 < own.runtime_version // 1000:
            serves = f"serves CUDA {_version(own.driver_version)}" if own.driver_version else "is missing"
            return (
                f"rank {rank}: the driver {serves}, this build needs {own.runtime_version // 1000}.0; update the "
                "driver, or build tracekern with an older CUDA toolkit"
            )
    return ""


def _different(facts: Sequence[GpuFacts]) -> str:
    first = facts[0]
    for rank, own in enumerate(facts):
        if own.name != first.name:
            return (
                f"rank 0 has a {first.name}, rank {rank} a {own.name}; these kernels want equal GPUs: choose them with "
                "CUDA_VISIBLE_DEVICES"
            )
    return ""


def _cannot_share(facts: Sequence[GpuFacts]) -> str:
    for rank, own in enumerate(facts):
        if len(facts) > 1 and own.is_mig:
            return f"rank {rank} has a MIG slice ({own.name}), which no peer reaches; run `nvidia-smi -mig 0`"
        for peer, theirs in enumerate(facts):
            if own.bus_id != theirs.bus_id and not own.reachable.get(theirs.bus_id, True):
                return (
                    f"rank {rank}: GPU {own.bus_id} cannot reach rank {peer}'s GPU {theirs.bus_id}; see "
                    "`nvidia-smi topo -p2p rw`, and choose GPUs that can"
                )
    return ""


def _shared(facts: Sequence[GpuFacts]) -> dict[str, list[int]]:
    """The ranks of each GPU that several have."""
    ranks_of: dict[str, list[int]] = {}
    for rank, own in enumerate(facts):
        ranks_of.setdefault(own.bus_id, []).append(rank)
    return {bus_id: ranks for bus_id, ranks in ranks_of.items() if len(ranks) > 1 and bus_id}


def _out_of_memory(facts: Sequence[GpuFacts]) -> str:
    shared = _shared(facts)
    for rank, own in enumerate(facts):
        num_heaps = len(shared.get(own.bus_id, [rank]))
        if num_heaps * own.heap_bytes > own.free_bytes:
            return out_of_memory(rank, own, num_heaps)
    return ""


def out_of_memory(rank: int, own: GpuFacts, num_heaps: int = 1) -> str:
    """One line for heaps that find no room on this rank's GPU."""
    heap = f"the symmetric heap wants {size(own.heap_bytes)}"
    heaps = f"the symmetric heaps of {num_heaps} ranks want {size(own.heap_bytes)} each"
    return (
        f"rank {rank}: {heap if num_heaps == 1 else heaps}, {size(own.free_bytes)} of "
        f"{size(own.total_bytes)} are free on {own.name} {own.bus_id}; make the shape smaller, or end what fills it"
    )


def _warnings(facts: Sequence[GpuFacts]) -> list[str]:
    warnings = [
        f"ranks {', '.join(map(str, ranks))} share GPU {bus_id}: kernels that wait for each other take turns on it"
        for bus_id, ranks in _shared(facts).items()
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


def _any(facts: Sequence[GpuFacts], key: str) -> list[int]:
    return [rank for rank, own in enumerate(facts) if getattr(own, key)]


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
