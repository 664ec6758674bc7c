"""What a capture asks of the device it records: its name and clock, memory for records, and how far its streams are."""

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


class CaptureDevice(Protocol):
    """A backend's device. tracekern/record/clock_samples.py calls read_ticks, read_brackets and ping_pong."""

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

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Around calls of its kernels: it is this thread's current device inside."""

    @property
    def clock(self) -> dict[str, Any]:
        """name, ticks_per_second, resolution_ticks."""

    fault_names: dict[str, Any]
    """Names for the numbers of a fault record (tracekern.dump.fault); for the dump."""

    @property
    def heap_ranks(self) -> Sequence[int]:
        """Ranks that share this rank's symmetric heap, in its order; they can play ping-pong in it."""

    @property
    def has_mirror(self) -> bool:
        """Whether it can record into memory of its own."""

    @property
    def max_regions_ahead(self) -> int:
        """How many launches of a kernel are worth preparing at once."""

    def attach(self, segment: SegmentWriter) -> None:
        """Kernels of this device are going to write into the segment."""

    def mirror_offset(self) -> int:
        """What to add, modulo 2^64, to an address in the arena for that in the device's own memory.

        Asked for only where it has a mirror; what is written there gets into the arena with collect().
        """

    def open_mirror(self) -> str:
        """Allocates that memory, before anything is recorded. Returns why it cannot, in a line; "" where it can."""

    def start_keeper(self, segment: SegmentWriter) -> str:
        """Lets another process hold its mirror from now on, so that this one's end does not take it away.

        Returns why that cannot be, in a line; "" where it can. Asked only where it has a mirror, before anything is
        recorded.
        """

    def mark(self, stream: int) -> Callable[[], bool]:
        """What says whether all that was launched on the stream before now is through. It never waits."""

    def is_stream_captured(self) -> bool:
        """Whether what is launched now becomes part of a graph instead of running."""

    def is_idle_within(self, limit_s: float) -> bool:
        """Waits for all kernels, at most so long. False where some still run, or the device is lost."""

    def collect(self, segment: SegmentWriter) -> None:
        """Copies what was recorded in the device's own memory into the arena.

        Where the device no longer answers, its keeper does it. Raises RuntimeError where there is none.
        """

    def detach(self) -> None:
        """They no longer do; the segment is about to go."""

    def trouble(self) -> str:
        """One line: why this process can use the device no more; "" while it can."""

    def read_ticks(self) -> int:
        """The clock, now."""

    def read_brackets(self, count: int) -> npt.NDArray[np.int64]:
        """[count, 3]: CLOCK_REALTIME ns before, device ticks, CLOCK_REALTIME ns after."""

    def ping_pong(
        self, peer: int, initiates: bool, epoch: int, max_round_trips: int, duration_ns: int
    ) -> npt.NDArray[np.int64]:
        """[n, 3] ticks sent, answered, received, on the initiator; [0, 3] on the responder.

        `peer` counts in the heap.
        """


class HostDevice:
    """The CPU backend with the host's own clock: what kernels record without a symmetric heap and a simulated clock."""

    backend = "cpu"
    torch_device = "cpu"
    name = "CPU"
    note = "CPU backend: order and coverage, never GPU durations"
    clock = {"name": "CLOCK_MONOTONIC", "ticks_per_second": 10**9, "resolution_ticks": 32}  # noqa: RUF012
    heap_ranks: Sequence[int] = ()
    fault_names: dict[str, Any] = {}  # noqa: RUF012 - a communicator gives its device names of its own
    has_mirror = False
    max_regions_ahead = 1

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """There is no other device."""
        return contextlib.nullcontext()

    def attach(self, segment: SegmentWriter) -> None:
        """Nothing to do: kernels share this process's memory."""

    def mirror_offset(self) -> int:
        """Never asked for: there is no other memory."""
        raise NotImplementedError("the CPU backend records in the arena itself")

    def open_mirror(self) -> str:
        """Never asked for: there is no other memory."""
        raise NotImplementedError("the CPU backend records in the arena itself")

    def start_keeper(self, segment: SegmentWriter) -> str:
        """Never asked for: there is no other memory."""
        raise NotImplementedError("the CPU backend records in the arena itself")

    def mark(self, stream: int) -> Callable[[], bool]:
        """A launch returns when it is through."""
        return lambda: True

    def is_stream_captured(self) -> bool:
        """There are no graphs."""
        return False

    def is_idle_within(self, limit_s: float) -> bool:
        """A launch returns when it is through."""
        return True

    def collect(self, segment: SegmentWriter) -> None:
        """Nothing to do: all records are in the arena."""

    def detach(self) -> None:
        """Nothing to do."""

    def trouble(self) -> str:
        return ""

    def read_ticks(self) -> int:
        return time.monotonic_ns() & ~31

    def read_brackets(self, count: int) -> npt.NDArray[np.int64]:
        rows = [(time.time_ns(), self.read_ticks(), time.time_ns()) for _ in range(count)]
        return np.array(rows, np.int64).reshape(count, 3)

    def ping_pong(
        self, peer: int, initiates: bool, epoch: int, max_round_trips: int, duration_ns: int
    ) -> npt.NDArray[np.int64]:
        """Never asked for: there is no heap."""
        raise NotImplementedError(f"rank pair with {peer}: no symmetric heap to play ping-pong in")


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
