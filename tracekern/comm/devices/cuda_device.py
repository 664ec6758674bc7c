"""A GPU as the device of a capture (tracekern.comm.devices.device.CaptureDevice)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput, DeviceLost
from tracekern.segment.keeper import Keeper, collect_mirrored, collect_or_let
from tracekern.segment.writer import SegmentWriter

_abandoned: list[Any] = []
"""Memory of closed captures that kernels still write to."""


class CudaDevice:
    """The GPU that is current in this thread when the object is made."""

    backend = "cuda"

    def __init__(self, native: Any, heap_ranks: Sequence[int], note: str = "", stream: Any = None) -> None:
        """native: the communicator. heap_ranks: see HeapPeers. stream: torch's stream of a resident rank; None where
        all streams of the GPU are this rank's.
        """
        self._gpu = gpu = _Gpu()
        self.name, self.torch_device = gpu.name, f"cuda:{gpu.index}"
        self.note = note
        self.fault_names: dict[str, Any] = {}
        self.clock = self.peers = CudaClock(gpu, native, heap_ranks)
        self.streams = CudaStreams(gpu, stream)
        self.memory = CudaMemory(gpu, native, self.streams)

    def active(self) -> contextlib.AbstractContextManager[Any]:
        return self._gpu.active()

    def error(self) -> str:
        return self._gpu.error()


class _Gpu:
    """State that all parts of a device share.

    The parts do not refer to the device itself: a reference cycle would keep the heap's memory alive.
    """

    def __init__(self) -> None:
        import torch

        from tracekern import _cuda

        self.cuda = _cuda
        self.index = torch.cuda.current_device()
        self.name = torch.cuda.get_device_name()

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Wraps calls that use the current device, which may have changed in this thread."""
        import torch

        device: contextlib.AbstractContextManager[Any] = torch.cuda.device(self.index)
        return device

    def error(self) -> str:
        """Returns why this process can no longer use its GPU, such as a trap; "" while it can."""
        try:
            with self.active():
                error = str(self.cuda.device_error())
        except RuntimeError as lost:
            error = str(lost)
        return f"{self.name} is lost to this process: {error}" if error else ""


class CudaClock:
    """The %globaltimer, and its ping-pong with the heap's other GPUs. Calls raise DeviceLost after a trap."""

    def __init__(self, gpu: _Gpu, native: Any, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self._gpu, self._native = gpu, native
        self._clock = gpu.cuda.GpuClock()
        with gpu.active():
            self.id = f"GPU {gpu.cuda.device_uuid()}"

    def describe(self) -> dict[str, Any]:
        """Probes the clock anew for each capture, because a profiler may change its resolution."""
        resolution = probe_resolution(self.read_brackets(2000)[:, 1])
        shift = self._gpu.cuda.clock_shift
        return {
            "name": "%globaltimer",
            "id": self.id,
            "ticks_per_second": 10**9,
            "resolution_ticks": resolution,
            "shift": shift,
        }

    def read_ticks(self) -> int:
        return int(self.read_brackets(1)[0, 1])

    def read_brackets(self, count: int) -> npt.NDArray[np.int64]:
        with self._losing():
            return np.asarray(self._clock.read_brackets(count))

    def ping_pong(
        self, peer: int, initiates: bool, epoch: int, max_round_trips: int, duration_ns: int
    ) -> npt.NDArray[np.int64]:
        with self._losing():
            return np.asarray(self._clock.ping_pong(self._native, peer, initiates, epoch, max_round_trips, duration_ns))

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Wraps calls on the device. Raises DeviceLost if one fails because a kernel trapped before it."""
        try:
            with self._gpu.active():
                yield
        except RuntimeError as error:
            raise DeviceLost(self._gpu.error() or str(error)) from error


class CudaStreams:
    """The streams of torch."""

    max_regions_ahead = 32

    def __init__(self, gpu: _Gpu, own: Any) -> None:
        self._gpu, self._own = gpu, own
        self.is_busy = False
        """Whether a kernel was still running at the last is_idle_within()."""

    def current(self) -> int:
        import torch

        return int(torch.cuda.current_stream(self._gpu.index).cuda_stream)

    def synchronize(self) -> None:
        import torch

        if self._own is not None:
            self._own.synchronize()
        else:
            torch.cuda.synchronize(self._gpu.index)

    def delay(self, stream: int, delay_ns: int) -> None:
        self._gpu.cuda.delay(delay_ns, stream)

    def mark(self, stream: int) -> Callable[[], bool]:
        try:
            with self._gpu.active():
                passed: Callable[[], bool] = self._gpu.cuda.StreamMark(stream).is_passed
        except RuntimeError:  # a kernel trapped: no region is used again
            return lambda: False
        return passed

    def is_captured(self) -> bool:
        """Returns whether torch's current stream is being captured."""
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    def is_idle_within(self, limit_s: float) -> bool:
        """Waits up to `limit_s` for all kernels. Returns False if one still runs, or traps."""

        def wait() -> None:
            with contextlib.suppress(RuntimeError):
                self.synchronize()
                idle.set()

        idle = threading.Event()
        waiter = threading.Thread(target=wait, daemon=True)  # only a thread can bound a wait for the device
        waiter.start()
        waiter.join(limit_s)
        self.is_busy = waiter.is_alive()
        return idle.is_set()


class CudaMemory:
    """The attached segment's arena, mapped for the GPU, and its mirror."""

    def __init__(self, gpu: _Gpu, native: Any, streams: CudaStreams) -> None:
        self._gpu, self._native, self._streams = gpu, native, streams
        self._segment: SegmentWriter | None = None
        self.mirror = CudaMirror(gpu)

    def attach(self, segment: SegmentWriter) -> None:
        """Lets kernels write into the segment's arena. Raises BadInput if the GPU cannot reach it."""
        arena, num_bytes = segment.back_arena()
        self._segment = segment
        try:
            with self._gpu.active():
                self.mirror.of_arena(self._gpu.cuda.GpuCapture(arena, num_bytes), arena)
        except RuntimeError as error:
            raise BadInput(f"{num_bytes} bytes of host memory for the GPU: {error}; lower max_bytes") from None
        self._native.keep_fault_at(segment.fault_record.ctypes.data)

    def collect(self, segment: SegmentWriter) -> None:
        """Copies the mirrored regions into the arena; the keeper does so if this process no longer can."""
        records = self.mirror.records

        def copy() -> None:
            if collect_mirrored(segment, records.collect):
                records.finish()

        collect_or_let(segment, copy, self.mirror.keeper)

    def detach(self, is_written: bool = False) -> None:
        """Stops kernels writing to the segment before it is unmapped. is_written: a kernel may yet; it stays mapped."""
        self._native.keep_fault_at(0)
        records = self.mirror.let_go()
        if is_written or self._streams.is_busy:
            _abandoned.append((records, self._segment))  # freeing it would wait for the kernels
        elif records is not None and not self._gpu.error():
            records.release()
        self._segment = None


class CudaMirror:
    """Device memory that replaces an arena, allocated on first use."""

    def __init__(self, gpu: _Gpu) -> None:
        self._gpu = gpu
        self._arena = 0
        self.records: Any = None
        """_cuda.GpuCapture of the arena."""
        self.keeper: Keeper | None = None

    def of_arena(self, records: Any, arena: int) -> None:
        """Makes this the mirror of the arena at address `arena`. records: the arena's _cuda.GpuCapture."""
        self.records, self._arena = records, arena

    def open(self) -> str:
        try:
            self.offset()
        except RuntimeError as error:
            return f"device memory for records: {error}; lower max_bytes"
        return ""

    def offset(self) -> int:
        with self._gpu.active():
            return (int(self.records.mirror()) - self._arena) % (1 << 64)

    def start_keeper(self, segment: SegmentWriter) -> str:
        try:
            with self._gpu.active():
                if self._gpu.cuda.device_facts()["has_mps"]:
                    return "MPS is on: a trap ends the keeper, too"
                descriptor = self.records.export_mirror()
                uuid = self._gpu.cuda.device_uuid()
            try:
                self.keeper = Keeper(segment, uuid, descriptor, int(segment.header["arena_bytes"]))
            finally:
                os.close(descriptor)
        except RuntimeError as error:
            self.records.drop_mirror()
            return str(error)
        return ""

    def let_go(self) -> Any:
        """Releases the keeper. Returns the arena's _cuda.GpuCapture and drops it; None if there is none."""
        if self.keeper is not None:
            self.keeper.release()
            self.keeper = None
        records, self.records = self.records, None
        return records


def probe_resolution(ticks: npt.NDArray[np.int64]) -> int:
    """Returns the coarsest step that divides all differences between the readings, such as 32 ticks."""
    return int(np.gcd.reduce(np.diff(ticks))) or 1
