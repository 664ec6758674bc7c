"""Interface of a capture to the device it records: identity, clock, memory for records, progress of streams."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput
from tracekern.host_clock import host_clock_id

if TYPE_CHECKING:
    from tracekern.comm.ranks.group import Group
    from tracekern.segment.writer import SegmentWriter


class DeviceClock(Protocol):
    """The clock that kernels stamp their records with."""

    @property
    def id(self) -> str:
        """A text that is equal for ranks that read the same physical clock; "" if that is not known."""

    def describe(self) -> dict[str, Any]:
        """Returns name, id, ticks_per_second, resolution_ticks, which may change from capture to capture, and shift.

        Records hold times in units of 2^shift ticks (csrc/trace/record.h).
        """

    def read_ticks(self) -> int:
        """Returns the clock's current value in ticks."""

    def read_brackets(self, count: int) -> npt.NDArray[np.int64]:
        """Returns brackets, [count, 3]: CLOCK_MONOTONIC ns before, device ticks, CLOCK_MONOTONIC ns after."""


class HeapPeers(Protocol):
    """The ranks that share this rank's symmetric heap, and ping-pong between their clocks in it."""

    @property
    def ranks(self) -> Sequence[int]:
        """What the run calls the ranks, in the heap's order."""

    def ping_pong(
        self, peer: int, initiates: bool, epoch: int, max_round_trips: int, duration_ns: int
    ) -> npt.NDArray[np.int64]:
        """Returns the ticks sent, answered and received, [n, 3], on the initiator; [0, 3] on the responder.

        peer: its number in the heap.
        """


class Mirror(Protocol):
    """Device memory that replaces a segment's arena; collect() copies it there."""

    def open(self) -> str:
        """Allocates it, before anything is recorded. Returns one line with the reason if it cannot, else ""."""

    def start_keeper(self, segment: SegmentWriter) -> str:
        """Makes another process hold the memory, too, so that it outlives this process.

        Returns one line with the reason if that cannot be, else "". Called only before anything is recorded.
        """

    def offset(self) -> int:
        """Returns what to add, modulo 2^64, to an address in the arena to get that in the mirror."""


class DeviceMemory(Protocol):
    """Where kernels write their records."""

    @property
    def mirror(self) -> Mirror | None:
        """The mirror; None if kernels can write into the segment only."""

    def attach(self, segment: SegmentWriter) -> None:
        """Lets kernels of this device write into the segment."""

    def collect(self, segment: SegmentWriter) -> None:
        """Copies what was recorded in the mirror into the arena.

        If the device no longer answers, its keeper does it. Raises RuntimeError if there is no keeper.
        """

    def detach(self, is_written: bool = False) -> None:
        """Stops kernels writing to the segment before it is unmapped. is_written: a kernel may yet; it stays mapped."""


class DeviceStreams(Protocol):
    """The queues that kernels are launched into."""

    @property
    def max_regions_ahead(self) -> int:
        """Most launches of a kernel to prepare at once."""

    def current(self) -> int:
        """Returns the handle of the stream that this thread launches on."""

    def synchronize(self) -> None:
        """Waits until this rank's kernels have finished. Raises RuntimeError if the device is lost."""

    def delay(self, stream: int, delay_ns: int) -> None:
        """Keeps the stream busy for so long."""

    def mark(self, stream: int) -> Callable[[], bool]:
        """Returns a function that checks, without waiting, whether all launches on the stream so far have finished."""

    def is_captured(self) -> bool:
        """Returns whether a launch now would become part of a graph instead of running."""

    def is_idle_within(self, limit_s: float) -> bool:
        """Waits up to `limit_s` for this rank's kernels. Returns False if some still run, or the device is lost."""


class CaptureDevice(Protocol):
    """The device of a backend."""

    @property
    def backend(self) -> str:
        """ "cpu", "cuda" or "hip"."""

    @property
    def name(self) -> str:
        """The device, in the vendor's words."""

    @property
    def note(self) -> str:
        """A caveat for readers of the trace; "" for none."""

    @property
    def torch_device(self) -> str:
        """torch's name of the device that holds the kernels' tensors."""

    fault_names: dict[str, Any]
    """Names for the numbers of a fault record (tracekern.dump.fault), stored in the dump."""

    @property
    def clock(self) -> DeviceClock: ...
    @property
    def peers(self) -> HeapPeers | None:
        """The ranks of the symmetric heap; None without one."""

    @property
    def memory(self) -> DeviceMemory: ...
    @property
    def streams(self) -> DeviceStreams: ...

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the device this thread's current one, for calls of its kernels."""

    def error(self) -> str:
        """Returns one line that says why this process can no longer use the device; "" while it can."""


class HostClock:
    """The host's clock, in steps as coarse as a GPU's."""

    def __init__(self) -> None:
        self.id = host_clock_id()

    def describe(self) -> dict[str, Any]:
        return {
            "name": "CLOCK_MONOTONIC",
            "id": self.id,
            "ticks_per_second": 10**9,
            "resolution_ticks": 32,
            "shift": 5,
        }

    def read_ticks(self) -> int:
        return time.monotonic_ns() & ~31

    def read_brackets(self, count: int) -> npt.NDArray[np.int64]:
        rows = [(time.monotonic_ns(), self.read_ticks(), time.monotonic_ns()) for _ in range(count)]
        return np.array(rows, np.int64).reshape(count, 3)


class HostMemory:
    """Memory of the CPU backend: kernels write to the segment directly, so there is nothing to do."""

    mirror: Mirror | None = None

    def attach(self, segment: SegmentWriter) -> None: ...
    def collect(self, segment: SegmentWriter) -> None: ...
    def detach(self, is_written: bool = False) -> None: ...


class HostStreams:
    """Streams of the CPU backend: a launch returns when it has finished, and there are no graphs."""

    max_regions_ahead = 1

    def current(self) -> int:
        return 0

    def synchronize(self) -> None: ...

    def delay(self, stream: int, delay_ns: int) -> None:
        time.sleep(delay_ns / 1e9)

    def mark(self, stream: int) -> Callable[[], bool]:
        return lambda: True

    def is_captured(self) -> bool:
        return False

    def is_idle_within(self, limit_s: float) -> bool:
        return True


class HostDevice:
    """The CPU backend with the host's clock, for kernels without a symmetric heap and a simulated clock."""

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
        """Does nothing: there is no other device."""
        return contextlib.nullcontext()

    def error(self) -> str:
        return ""


def open_device(wanted: CaptureDevice | str, group: Group) -> CaptureDevice:
    """Returns the device `wanted`, or opens the one of that name: "cpu" or "cuda". Collective.

    Raises BadInput for any other value.
    """
    if not isinstance(wanted, str):
        return wanted
    if wanted == "cpu":
        return HostDevice()
    if wanted != "cuda":
        raise BadInput(f"device={wanted!r}: wanted 'cpu', 'cuda' or the device of a communicator")
    from tracekern import _core
    from tracekern.comm.devices.cuda import open_cuda

    return open_cuda(group, _core.heap_control_bytes, timeout_s=10.0)[1]
