"""The CPU backend's device of a communicator: this rank's simulated clock, and the heap that its ranks share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tracekern.comm.devices.device import HostDevice, HostMemory
from tracekern.comm.heap import SymmetricHeap
from tracekern.errors import BadInput
from tracekern.host_clock import host_clock_id

if TYPE_CHECKING:
    from tracekern.segment.writer import SegmentWriter


class CpuDevice(HostDevice):
    """The CPU backend's device for a capture (tracekern.comm.devices.device.CaptureDevice)."""

    def __init__(self, native: Any, heap: SymmetricHeap, ranks: Sequence[int], clock_seed: int) -> None:
        """heap: the memory that `native` points into; kept alive with this device. ranks: see HeapPeers. clock_seed: of
        its clock."""
        super().__init__()
        self._native = native
        self._heap = heap
        self.clock = self.peers = SimulatedClock(native, ranks, clock_seed)
        self.memory = _FaultMemory(native)

    def error(self) -> str:
        """Returns why this process can no longer use the simulated device; "" while it can."""
        return "a kernel trapped: this process can no longer use its device" if self._native.trapped else ""


class SimulatedClock:
    """The simulated clock of a rank, and its ping-pong with those of its peers."""

    def __init__(self, native: Any, ranks: Sequence[int], seed: int) -> None:
        """seed: of the clock in `native`; 0 for the host's clock."""
        from tracekern import _core

        self.id = "" if seed else host_clock_id()
        self.ranks = ranks
        self._native, self._c = native, _core

    def describe(self) -> dict[str, Any]:
        return {
            "name": "simulated device clock",
            "id": self.id,
            "ticks_per_second": self._c.simulated_ticks_per_second,
            "resolution_ticks": self._c.simulated_resolution_ticks,
            "shift": self._c.clock_shift,
        }

    def read_ticks(self) -> int:
        return int(self._c.read_clock(self._native))

    def read_brackets(self, count: int) -> npt.NDArray[np.int64]:
        return np.asarray(self._c.read_brackets(self._native, count))

    def ping_pong(
        self, peer: int, initiates: bool, epoch: int, max_round_trips: int, duration_ns: int
    ) -> npt.NDArray[np.int64]:
        stamps = self._c.clock_ping_pong(self._native, peer, initiates, epoch, max_round_trips, duration_ns)
        return np.asarray(stamps)


class _FaultMemory(HostMemory):
    """Faults are written into the segment of the capture that is open."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def attach(self, segment: SegmentWriter) -> None:
        self._native.keep_fault_at(segment.fault_record.ctypes.data)

    def detach(self, is_written: bool = False) -> None:
        self._native.keep_fault_at(0)


def clock_from_environment() -> tuple[int, int]:
    """Returns (seed, t0_ns) of the simulated clock; seed 0, the host's clock, if TRACEKERN_SIMULATED_CLOCK is not set.

    Raises BadInput if the variable cannot be parsed.
    """
    text = os.environ.get("TRACEKERN_SIMULATED_CLOCK", "0:0")
    try:
        seed, t0_ns = (int(part) for part in text.split(":"))
    except ValueError:
        raise BadInput(f"TRACEKERN_SIMULATED_CLOCK is {text!r}; wanted SEED:T0_NS") from None
    return seed, t0_ns
