"""A rank's end of a symmetric heap on a GPU: opening it over all ranks of a node, and the device's clock."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.comm.descriptors import exchange_descriptors
from tracekern.comm.group import Group, host_identity
from tracekern.comm.preflight import GpuFacts, find_profiler, judge, out_of_memory, why_only_compiled
from tracekern.errors import BadInput, DeviceLost
from tracekern.segment.keeper import Keeper, collect_mirrored, collect_or_let
from tracekern.segment.writer import SegmentWriter

_log = logging.getLogger("tracekern")
_abandoned: list[Any] = []
"""Captures' memory that kernels still write to."""


class CudaDevice:
    """What a capture asks of a GPU (tracekern.comm.device.CaptureDevice)."""

    backend = "cuda"
    has_mirror = True
    max_regions_ahead = 32

    def __init__(self, native: Any, heap_ranks: Sequence[int], note: str = "") -> None:
        import torch

        from tracekern import _cuda

        self._native = native
        self._cuda = _cuda
        self.heap_ranks = heap_ranks
        self.note = note
        self.fault_names: dict[str, Any] = {}
        self._clock = _cuda.GpuClock()
        self._is_busy = False
        self._memory: Any = None
        self._segment: SegmentWriter | None = None
        self._keeper: Keeper | None = None
        self._index = torch.cuda.current_device()
        self.name = torch.cuda.get_device_name()
        self.torch_device = f"cuda:{self._index}"

    @property
    def clock(self) -> dict[str, Any]:
        """Probed anew for each capture: a profiler may change how finely the clock steps."""
        return {
            "name": "%globaltimer",
            "ticks_per_second": 10**9,
            "resolution_ticks": probe_resolution(self.read_brackets(2000)[:, 1]),
        }

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Around calls that mean the current device: a thread's may be another one by now."""
        import torch

        device: contextlib.AbstractContextManager[Any] = torch.cuda.device(self._index)
        return device

    def attach(self, segment: SegmentWriter) -> None:
        """Lets kernels write into the segment's arena. Raises BadInput where the GPU cannot reach it."""
        self._arena, num_bytes = segment.back_arena()
        self._segment = segment
        try:
            with self.active():
                self._memory = self._cuda.GpuCapture(self._arena, num_bytes)
        except RuntimeError as error:
            raise BadInput(f"{num_bytes} bytes of host memory for the GPU: {error}; lower max_bytes") from None
        self._native.keep_fault_at(segment.fault_record.ctypes.data)

    def open_mirror(self) -> str:
        """Allocates device memory for records. Returns why it cannot, in a line; "" where it can."""
        try:
            self.mirror_offset()
        except RuntimeError as error:
            return f"device memory for records: {error}; lower max_bytes"
        return ""

    def start_keeper(self, segment: SegmentWriter) -> str:
        """Lets another process hold the mirror from now on. Returns why that cannot be; "" where it can."""
        try:
            with self.active():
                if self._cuda.device_facts()["has_mps"]:
                    return "MPS is on: a trap ends the keeper, too"
                descriptor = self._memory.export_mirror()
                uuid = self._cuda.device_uuid()
            try:
                self._keeper = Keeper(segment, uuid, descriptor, int(segment.header["arena_bytes"]))
            finally:
                os.close(descriptor)
        except RuntimeError as error:
            self._memory.drop_mirror()
            return str(error)
        return ""

    def mark(self, stream: int) -> Callable[[], bool]:
        """What says whether all that was launched on the stream before now is through."""
        try:
            with self.active():
                passed: Callable[[], bool] = self._cuda.StreamMark(stream).is_passed
        except RuntimeError:  # a kernel trapped: all that was recorded is to stay
            return lambda: False
        return passed

    def is_stream_captured(self) -> bool:
        """Of torch's current stream."""
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    def mirror_offset(self) -> int:
        """What to add, modulo 2^64, to an address in the arena for its place in device memory."""
        with self.active():  # it is allocated when it is first asked for
            return (int(self._memory.mirror()) - self._arena) % (1 << 64)

    def is_idle_within(self, limit_s: float) -> bool:
        """Waits so long for all kernels; False, too, where one traps."""
        import torch

        def wait() -> None:
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._index)
                idle.set()

        idle = threading.Event()
        waiter = threading.Thread(target=wait, daemon=True)  # nothing else limits a wait for the device
        waiter.start()
        waiter.join(limit_s)
        self._is_busy = waiter.is_alive()
        return idle.is_set()

    def collect(self, segment: SegmentWriter) -> None:
        """Copies the mirrored regions into the arena, or lets the keeper do so where this process no longer can."""

        def copy() -> None:
            if collect_mirrored(segment, self._memory.collect):
                self._memory.finish()

        collect_or_let(segment, copy, self._keeper)

    def detach(self) -> None:
        """The segment is about to go."""
        self._native.keep_fault_at(0)
        if self._keeper is not None:
            self._keeper.release()
            self._keeper = None
        if self._is_busy:
            _abandoned.append((self._memory, self._segment))  # to give it back would wait for the kernels
        elif self._memory is not None and not self.trouble():
            self._memory.release()
        self._memory = self._segment = None

    def trouble(self) -> str:
        """Why this process can use its GPU no more, such as a trap; "" while it can."""
        try:
            with self.active():
                error = str(self._cuda.device_error())
        except RuntimeError as lost:
            error = str(lost)
        return f"{self.name} is lost to this process: {error}" if error else ""

    def read_ticks(self) -> int:
        """The clock, now."""
        with self._losing():
            return int(self._clock.read_brackets(1)[0, 1])

    def read_brackets(self, count: int) -> npt.NDArray[np.int64]:
        """[count, 3]: CLOCK_REALTIME ns before, device ticks, CLOCK_REALTIME ns after."""
        with self._losing():
            return np.asarray(self._clock.read_brackets(count))

    def ping_pong(
        self, peer: int, initiates: bool, epoch: int, max_round_trips: int, duration_ns: int
    ) -> npt.NDArray[np.int64]:
        """[n, 3] ticks sent, answered, received, on the initiator; [0, 3] on the responder."""
        with self._losing():
            return np.asarray(self._clock.ping_pong(self._native, peer, initiates, epoch, max_round_trips, duration_ns))

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Calls on this device. Raises DeviceLost where one fails because a kernel trapped before it."""
        try:
            with self.active():
                yield
        except RuntimeError as error:
            raise DeviceLost(self.trouble() or str(error)) from error


def probe_resolution(ticks: npt.NDArray[np.int64]) -> int:
    """The coarsest step that divides all differences of many readings: 32 on an H200 (measured 2026-11)."""
    return int(np.gcd.reduce(np.diff(ticks))) or 1


def open_cuda(group: Group, num_bytes: int, timeout_s: float) -> tuple[Any, CudaDevice]:
    """The native communicator and the device; collective.

    Raises BadInput, the same on all ranks, where GPUs cannot reach each other or have no room.
    """
    if missing := why_only_compiled():
        raise BadInput(f"{missing}; take the CPU backend")
    try:
        from tracekern import _cuda
    except ImportError as error:
        raise BadInput(
            f"no kernels for GPUs: {error}; build tracekern where nvcc is, or take the CPU backend"
        ) from None

    facts = group.all_gather(collect_facts(num_bytes))
    verdict = judge(facts)
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
        problem = out_of_memory(group.rank, now) if full else f"rank {group.rank}: symmetric heap: {error}"
    group.refuse_together(problem)
    group.refuse_together(_map_peers(group, native, by_descriptor))
    return native, CudaDevice(native, range(group.num_ranks), verdict.note)


def _map_peers(group: Group, native: Any, by_descriptor: bool) -> str:
    """Maps the parts of all other ranks. Collective. Returns what went wrong."""
    parts: dict[int, Any]
    if by_descriptor:
        parts, add = exchange_descriptors(group, native.export_heap), native.import_peer
    else:
        handles = group.all_gather(native.heap_handle())
        parts, add = {peer: handles[peer] for peer in range(group.num_ranks) if peer != group.rank}, native.open_peer
    problem = ""
    for peer, part in parts.items():
        try:
            add(peer, part)
        except RuntimeError as error:
            why = f"{error}; see `nvidia-smi topo -p2p rw`"
            problem = f"rank {group.rank}: its GPU cannot map the memory of rank {peer}'s: {why}"
    for descriptor in parts.values() if by_descriptor else ():
        os.close(descriptor)
    return problem


def collect_facts(num_bytes: int) -> GpuFacts:
    """What is to be known of this rank's GPU. Never raises: what cannot be found out is said in `error`."""
    from tracekern import _cuda

    driver, runtime = _cuda.driver_versions()
    known = {
        "node": host_identity(),
        "heap_bytes": num_bytes,
        "driver_version": driver,
        "runtime_version": runtime,
        "profiler": find_profiler(),
    }
    try:
        return GpuFacts(**known, **_cuda.device_facts())
    except RuntimeError as error:
        return GpuFacts(**known, error=str(error))
