"""A rank's end of a symmetric heap on the CPU backend: its clock, its time limit, its faults."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput, CommTimeout
from tracekern.record.device import CaptureDevice, HostDevice
from tracekern.record.group import Group
from tracekern.record.symmetric_heap import SymmetricHeap

if TYPE_CHECKING:
    from tracekern.record.session import Capture


def clock_from_environment() -> tuple[int, int]:
    """(seed, t0_ns) of the simulated clock; seed 0, the host's clock, where TRACEKERN_SIMULATED_CLOCK is not set."""
    text = os.environ.get("TRACEKERN_SIMULATED_CLOCK", "0:0")
    try:
        seed, t0_ns = (int(part) for part in text.split(":"))
    except ValueError:
        raise BadInput(f"TRACEKERN_SIMULATED_CLOCK is {text!r}; wanted SEED:T0_NS") from None
    return seed, t0_ns


class CpuDevice(HostDevice):
    """What a capture asks of the CPU backend (tracekern.record.device.CaptureDevice): this rank's simulated clock."""

    def __init__(self, native: Any, heap_ranks: Sequence[int]) -> None:
        from tracekern import _C

        self._native = native
        self._c = _C
        self.heap_ranks = heap_ranks
        self.clock: dict[str, Any] = {
            "name": "simulated device clock",
            "ticks_per_second": _C.simulated_ticks_per_second,
            "resolution_ticks": _C.simulated_resolution_ticks,
        }

    def read_ticks(self) -> int:
        """This rank's clock, now."""
        return int(self._c.read_clock(self._native))

    def read_brackets(self, count: int) -> npt.NDArray[np.int64]:
        """[count, 3]: CLOCK_REALTIME ns before, device ticks, CLOCK_REALTIME ns after."""
        return np.asarray(self._c.read_brackets(self._native, count))

    def ping_pong(
        self, peer: int, initiates: bool, epoch: int, max_round_trips: int, duration_ns: int
    ) -> npt.NDArray[np.int64]:
        """[n, 3] ticks sent, answered, received, on the initiator; [0, 3] on the responder."""
        stamps = self._c.clock_ping_pong(self._native, peer, initiates, epoch, max_round_trips, duration_ns)
        return np.asarray(stamps)


class Communicator:
    """One rank's end of a symmetric heap. Collective to make, to reset, and in barrier()."""

    def __init__(self, group: Group, num_bytes: int, timeout_s: float, backend: str = "cpu") -> None:
        """num_bytes: of each rank's part. backend: "cpu" or "cuda"."""
        from tracekern import _C

        self.group = group
        self.native: Any
        self.device: CaptureDevice
        """For tracekern.capture(..., device=...)."""
        if backend == "cuda":
            from tracekern.record.cuda import open_cuda

            self.native, self.device = open_cuda(group, num_bytes, timeout_s)
        else:
            self._open_cpu(num_bytes, timeout_s)
        self._barrier_events = _C.barrier_event_table()
        group.barrier()

    def _open_cpu(self, num_bytes: int, timeout_s: float) -> None:
        from tracekern import _C

        self._heap = SymmetricHeap(self.group, num_bytes)
        seed, t0_ns = clock_from_environment()
        self.native = _C.CpuCommunicator(
            rank=self.group.rank,
            heaps=self._heap.addresses,
            timeout_ns=int(timeout_s * 1e9),
            clock_seed=seed,
            clock_t0_ns=t0_ns,
        )
        self.device = CpuDevice(self.native, range(self.group.num_ranks))

    def barrier(self, capture: Capture | None = None) -> None:
        """All ranks arrive before any returns: a kernel of one warp, traced like any other."""
        descriptor, record_format = 0, "wide"
        if capture is not None:
            launch = capture.launch(
                "rank_barrier", grid=1, warps=1, events=self._barrier_events, epoch=self.native.barrier_epoch
            )
            descriptor, record_format = launch.descriptor, capture.record_format
        self.native.barrier(descriptor=descriptor, record_format=record_format)
        self.synchronize()
        self.check("rank_barrier", ("rank_barrier",))

    def synchronize(self) -> None:
        """Returns when this rank's kernels are through."""
        if self.device.backend == "cuda":
            import torch

            torch.cuda.synchronize()

    def check(self, kernel: str, phases: tuple[str, ...]) -> None:
        """Raises CommTimeout when a wait gave up; phases: names of the kernel's phases, as its faults count them."""
        fault = self.native.fault()
        if fault is not None:
            raise CommTimeout(describe_fault(kernel, phases, fault))


def describe_fault(kernel: str, phases: tuple[str, ...], fault: dict[str, Any]) -> str:
    """One line: who waited for whom, in which kernel, for what, and what was there instead."""
    phase = phases[fault["phase"]] if fault["phase"] < len(phases) else kernel
    who = f"rank {fault['rank']} {phase} block {fault['block']} warp {fault['warp']}"
    what = (
        f"channel {fault['channel']} slot {fault['slot']}: wanted epoch {fault['wanted_epoch']}, "
        f"saw epoch {fault['seen_epoch']} value {fault['seen_value']}"
    )
    waited = f"after {fault['waited_ns'] / 1e6:.0f} ms"
    if fault["cause"] == "peer_aborted":
        return f"{who} stopped waiting for rank {fault['peer']} {waited}: rank {fault['aborted_by']} gave up; {what}"
    return f"{who} gave up on rank {fault['peer']} {waited}; {what}; see what rank {fault['peer']} was doing"
