"""Opens a rank's end of a symmetric heap on a GPU, over all ranks of a node."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
from collections.abc import Sequence
from typing import Any

from tracekern.comm.descriptors import exchange_descriptors
from tracekern.comm.devices.cuda_device import CudaDevice
from tracekern.comm.devices.preflight import GpuFacts, find_profiler, judge, out_of_memory, why_only_compiled
from tracekern.comm.ranks.group import Group
from tracekern.comm.ranks.node import descriptor_reach
from tracekern.comm.ranks.resident import ResidentGroup
from tracekern.errors import BadInput

_log = logging.getLogger("tracekern")


def open_cuda(
    group: Group, num_bytes: int, timeout_s: float, hosts: Sequence[int] | None = None
) -> tuple[Any, CudaDevice]:
    """Returns the native communicator and the device. Collective. hosts: of each rank the number of its host.

    Raises BadInput, the same on all ranks, if GPUs cannot reach each other or have no room.
    """
    if missing := why_only_compiled():
        raise BadInput(f"{missing}; take the CPU backend")
    try:
        from tracekern import _cuda
    except ImportError as error:
        raise BadInput(f"{error}; or take the CPU backend") from None

    import torch

    is_resident = isinstance(group, ResidentGroup)
    if hosts and not is_resident:
        raise BadInput(
            "hosts: ranks on GPUs reach other hosts only as resident ranks of one GPU so far; let them see one alone "
            "(CUDA_VISIBLE_DEVICES), or take the CPU backend"
        )
    own_facts = dataclasses.replace(collect_facts(num_bytes), is_resident=is_resident)
    told = group.all_gather(dataclasses.asdict(own_facts), "the opening of GPUs")
    facts = [GpuFacts(**theirs) for theirs in told]
    verdict = judge(dict(zip(group.world_ranks, facts, strict=True)))
    if verdict.refusal:
        raise BadInput(verdict.refusal)
    for text in verdict.warnings if group.rank == 0 else ():
        _log.warning("%s", text)
    native: Any
    problem = ""
    try:
        timeout_ns, by_descriptor = int(timeout_s * 1e9), all(own.exports_memory for own in facts)
        native = _cuda.CudaCommunicator(group.rank, group.num_ranks, num_bytes, timeout_ns, by_descriptor)
    except RuntimeError as error:
        full = "out of memory" in str(error)
        now = collect_facts(num_bytes)
        problem = out_of_memory(group.world_rank, now) if full else f"rank {group.world_rank}: symmetric heap: {error}"
    group.refuse_together(problem)
    group.refuse_together(_map_peers(group, native, by_descriptor, hosts))
    stream = torch.cuda.current_stream() if is_resident else None
    return native, CudaDevice(native, group.world_ranks, verdict.note, stream)


def _map_peers(group: Group, native: Any, by_descriptor: bool, hosts: Sequence[int] | None) -> str:
    """Maps the parts of all other ranks of the host. Collective. Returns what went wrong."""
    if isinstance(group, ResidentGroup):
        for peer, theirs in enumerate(group.share(native)):
            if peer != group.rank:
                native.attach_peer(theirs, is_mapped=not hosts or hosts[peer] == hosts[group.rank])
        return ""
    parts: dict[int, Any]
    if by_descriptor:
        parts, add = exchange_descriptors(group, native.export_heap), native.import_peer
    else:
        handles = group.all_gather(native.heap_handle(), "the mapping of heaps")
        parts, add = {peer: handles[peer] for peer in range(group.num_ranks) if peer != group.rank}, native.open_peer
    problem = ""
    for peer, part in parts.items():
        try:
            add(peer, part)
        except RuntimeError as error:
            why = f"{error}; see `nvidia-smi topo -p2p rw`"
            problem = (
                f"rank {group.world_rank}: its GPU cannot map the memory of rank {group.world_ranks[peer]}'s: {why}"
            )
    for descriptor in parts.values() if by_descriptor else ():
        os.close(descriptor)
    return problem


def collect_facts(num_bytes: int) -> GpuFacts:
    """Collects the facts of this rank's GPU. Never raises: `error` says what could not be found out."""
    from tracekern import _cuda

    driver, runtime = _cuda.driver_versions()
    known = {
        "node": platform.node(),
        "reach": descriptor_reach(),
        "heap_bytes": num_bytes,
        "driver_version": driver,
        "runtime_version": runtime,
        "profiler": find_profiler(),
    }
    try:
        return GpuFacts(**known, **_cuda.device_facts())
    except RuntimeError as error:
        return GpuFacts(**known, error=str(error))
