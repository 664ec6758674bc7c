"""What a capture asks of the device it records: who it is, its clock, memory for records, how far its streams are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput

if TYPE_CHECKING:
    from tracekern.comm.group import Group
    from tracekern.segment.writer import SegmentWriter


class DeviceClock(Protocol):
    """The clock that kernels stamp their records with."""

    def describe(self) -> dict[str, Any]:
        """name, ticks_per_second, resolution_ticks; the last may change from capture to capture."""

    def read_ticks(self) -> int:
        """The clock, now."""

    def read_brackets(self, count: int) -> npt.NDArray[np.int64]:
        """[count, 3]: CLOCK_REALTIME ns before, device ticks, CLOCK_REALTIME ns after."""


class HeapPeers(Protocol):
    """The ranks that share this rank's symmetric heap, whose clocks meet in it."""

    @property
    def ranks(self) -> Sequence[int]:
        """In the heap's order."""

    def ping_pong(
        self, peer: int, initiates: bool, epoch: int, max_round_trips: int, duration_ns: int
    ) -> npt.NDArray[np.int64]:
        """[n, 3] ticks sent, answered, received, on the initiator; [0, 3] on the responder.

        `peer` counts in the heap.
        """


class Mirror(Protocol):
    """Memory of the device's own in the place of a segment's arena; collect() brings it there."""

    def open(self) -> str:
        """Allocates it, before anything is recorded. Returns why it cannot, in a line; "" where it can."""

    def start_keeper(self, segment: SegmentWriter) -> str:
        """Lets another process hold it from now on, so that this one's end does not take it away.

        Returns why that cannot be, in a line; "" where it can. Asked only before anything is recorded.
        """

    def offset(self) -> int:
        """What to add, modulo 2^64, to an address in the arena for that in the mirror."""


class DeviceMemory(Protocol):
    """Where kernels write their records."""

    @property
    def mirror(self) -> Mirror | None:
        """None where they can write into the segment alone."""

    def attach(self, segment: SegmentWriter) -> None:
        """Kernels of this device are going to write into the segment."""

    def collect(self, segment: SegmentWriter) -> None:
        """Copies what was recorded in the mirror into the arena.

        Where the device no longer answers, its keeper does it. Raises RuntimeError where there is none.
        """

    def detach(self) -> None:
        """They no longer do; the segment is about to go."""


class DeviceStreams(Protocol):
    """The queues that kernels are launched into."""

    @property
    def max_regions_ahead(self) -> int:
        """How many launches of a kernel are worth preparing at once."""

    def mark(self, stream: int) -> Callable[[], bool]:
        """What says whether all that was launched on the stream before now is through. It never waits."""

    def is_captured(self) -> bool:
        """Whether what is launched now becomes part of a graph instead of running."""

    def is_idle_within(self, limit_s: float) -> bool:
        """Waits for all kernels, at most so long. False where some still run, or the device is lost."""


class CaptureDevice(Protocol):
    """A backend's device."""

    @property
    def backend(self) -> str:
        """ "cpu", "cuda" or "hip"."""

    @property
    def name(self) -> str:
        """The device, in the vendor's words."""

    @property
    def note(self) -> str:
        """What a reader of the trace has to know; "" for nothing."""

    @property
    def torch_device(self) -> str:
        """Where tensors of its kernels are, as torch writes it."""

    fault_names: dict[str, Any]
    """Names for the numbers of a fault record (tracekern.dump.fault); for the dump."""

    @property
    def clock(self) -> DeviceClock: ...
    @property
    def peers(self) -> HeapPeers | None:
        """None without a symmetric heap."""

    @property
    def memory(self) -> DeviceMemory: ...
    @property
    def streams(self) -> DeviceStreams: ...

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Around calls of its kernels: it is this thread's current device inside."""

    def error(self) -> str:
        """One line: why this process can use the device no more; "" while it can."""


class HostClock:
    """The host's own, in steps as coarse as a GPU's."""

    def describe(self) -> dict[str, Any]:
        return {"name": "CLOCK_MONOTONIC", "ticks_per_second": 10**9, "resolution_ticks": 32}

    def read_ticks(self) -> int:
        return time.monotonic_ns() & ~31

    def read_brackets(self, count: int) -> npt.NDArray[np.int64]:
        rows = [(time.time_ns(), self.read_ticks(), time.time_ns()) for _ in range(count)]
        return np.array(rows, np.int64).reshape(count, 3)


class HostMemory:
    """Kernels share this process's memory: there is nothing to do."""

    mirror: Mirror | None = None

    def attach(self, segment: SegmentWriter) -> None: ...
    def collect(self, segment: SegmentWriter) -> None: ...
    def detach(self) -> None: ...


class HostStreams:
    """A launch returns when it is through, and there are no graphs."""

    max_regions_ahead = 1

    def mark(self, stream: int) -> Callable[[], bool]:
        return lambda: True

    def is_captured(self) -> bool:
        return False

    def is_idle_within(self, limit_s: float) -> bool:
        return True


class HostDevice:
    """The CPU backend with the host's own clock: what kernels record without a symmetric heap and a simulated clock."""

    backend = "cpu"
    torch_device = "cpu"
    name = "CPU"
    note = "CPU backend: order and coverage, never GPU durations"

    def __init__(self) -> None:
        self.fault_names: dict[str, Any] = {}
        self.clock: DeviceClock = HostClock()
        self.peers: HeapPeers | None = None
        self.memory: DeviceMemory = HostMemory()
        self.streams: DeviceStreams = HostStreams()

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """There is no other device."""
        return contextlib.nullcontext()

    def error(self) -> str:
        return ""


def open_device(wanted: CaptureDevice | str, group: Group) -> CaptureDevice:
    """A device that is one already, or the one of that name: "cpu" or "cuda"; collective. Raises BadInput."""
    if not isinstance(wanted, str):
        return wanted
    if wanted == "cpu":
        return HostDevice()
    if wanted != "cuda":
        raise BadInput(f"device={wanted!r}: wanted 'cpu', 'cuda' or the device of a communicator")
    from tracekern import _C
    from tracekern.comm.cuda import open_cuda

    return open_cuda(group, _C.heap_control_bytes, timeout_s=10.0)[1]
