"""A CUDA graph in two instances, traced and untraced, and the ring that hands each traced replay separate regions.

csrc/trace/graph.h has the device's side; docs/graphs.md describes the design.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekern.comm.devices.this_thread import this_resident
from tracekern.dump import format as fmt
from tracekern.errors import BadInput
from tracekern.garbage import without_collector
from tracekern.record.launches import check_name
from tracekern.record.regions import RegionSets
from tracekern.segment.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from tracekern.comm.devices.device import CaptureDevice
    from tracekern.segment.writer import SegmentWriter

MAX_LAUNCHES_OF_A_GRAPH = 64

_log = logging.getLogger("tracekern")


def check_graph(name: str, slots: int, backend: str) -> None:
    """Raises BadInput where no graph can be traced."""
    if backend != "cuda":
        raise BadInput(f"capture.graph({name!r}): the {backend} backend has no graphs; it needs a GPU")
    if this_resident() is not None:
        raise BadInput(
            f"capture.graph({name!r}): resident ranks replay no graphs, which would launch all kernels of one rank "
            "before those of the next; launch them one by one"
        )
    if slots < 1:
        raise BadInput(f"capture.graph({name!r}): slots={slots}; wanted 1 or more")


class TracedGraph:
    """A CUDA graph in a traced and an untraced instance. Made by `Capture.graph()`.

    Use it from one thread at a time. After the capture has closed it runs untraced.
    """

    def __init__(
        self,
        segment: SegmentWriter,
        device: CaptureDevice,
        name: str,
        slots: int,
        recycles: bool,
        before_replay: Callable[[Callable[[], bool]], bool],
    ) -> None:
        """recycles: for a flight recorder: without room left, the oldest replay's regions are used again.

        before_replay: called before each traced replay with a function that reserves its regions; returns the result
        of that function.
        """
        from tracekern import _cuda

        self.name = name
        self._segment = segment
        self._device = device
        self._before_replay = before_replay
        with device.active():
            self._ring = _cuda.GraphRing(slots, MAX_LAUNCHES_OF_A_GRAPH)
        self._plans: list[LaunchPlan] = []
        self._capturing = ""
        self._thread = 0
        self._recycles = recycles
        self._slots = slots
        self._num_without_room = 0  # replays that ran untraced
        self._is_open = True

    @property
    def is_capturing(self) -> bool:
        """Whether the graph's run() is being captured now, by this thread."""
        return bool(self._capturing) and self._thread == threading.get_ident()

    @property
    def lost_replays(self) -> int:
        """Number of traced replays that were not recorded: host late, or capture full. Exact once it has closed."""
        return int(self._ring.lost_replays) + self._num_without_room

    @property
    def lost_records(self) -> int:
        """Number of records lost with replays for which the host was late. Not counted by a flight recorder."""
        return int(self._ring.lost_records)

    def capture(self, run: Callable[[], None]) -> None:
        """Captures both instances; `Capture.graph()` calls it."""
        self._traced = self._capture_instance("traced", run)
        self._untraced = self._capture_instance("untraced", run)
        if not self._plans:
            raise BadInput(
                f"capture.graph({self.name!r}): run() never called capture.launch(); there is nothing to trace"
            )
        mirrored = any(plan.flags & fmt.ENTRY_MIRRORED for plan in self._plans)
        flags = fmt.ENTRY_IN_GRAPH | (fmt.ENTRY_MIRRORED if mirrored else 0)
        self._plans = [dataclasses.replace(plan, flags=flags) for plan in self._plans]
        mirror = self._device.memory.mirror if mirrored else None
        mirror_offset = mirror.offset() if mirror is not None else 0
        self._ring.finish(mirror_offset, counts=not self._recycles)
        ahead, segment = self._device.streams.max_regions_ahead, self._segment
        self._sets = RegionSets(segment, self._ring, self._plans, mirror_offset, ahead, self._recycles)
        wanted, room = self._sets.fewest * self._sets.set_bytes, segment.arena_room
        if room < wanted:
            needs = f"its replays take {wanted} bytes at least, and only {room} of max_bytes are left"
            _log.warning("graph %s: %s: raise it, or lower records_per_track", self.name, needs)

    def add_launch(self, plan: LaunchPlan) -> int:
        """Returns LaunchHandle.descriptor of a launch inside run(); 0 in the untraced instance."""
        if self._capturing == "untraced":
            return 0
        if len(self._plans) == MAX_LAUNCHES_OF_A_GRAPH:
            raise BadInput(
                f"capture.graph({self.name!r}): more than {MAX_LAUNCHES_OF_A_GRAPH} traced launches; give "
                "capture.launch() to fewer kernels of run(), or make two graphs"
            )
        name = f"{self.name}/{plan.name}"
        check_name(name)
        self._plans.append(dataclasses.replace(plan, name=name))
        descriptor = np.frombuffer(plan.descriptor, fmt.LAUNCH_DESCRIPTOR).copy()  # aligned
        return int(self._ring.add_launch(descriptor.ctypes.data, plan.num_tracks)) + plan.choice

    def replay(self, traced: bool = True) -> None:
        """Launches the graph on torch's current stream. Never waits for the GPU.

        Args:
            traced: Which instance to launch.
        """
        if not traced or not self._is_open:
            self._untraced.replay()
        elif self._before_replay(self._sets.lay_ready):
            self._traced.replay()
        else:
            # Without regions the traced instance would still spend time counting what it cannot record.
            self._num_without_room += 1
            self._untraced.replay()

    def close(self, is_idle: bool) -> None:
        """Adds this graph's losses to what the closing capture reports. is_idle: all replays have finished."""
        if not self._is_open:
            return
        self._is_open = False
        if not is_idle:
            _log.warning("graph %s: its last replays were not counted", self.name)
            return
        with self._device.active():
            self._ring.settle()
        sets = self._sets
        self._segment.refuse(self.lost_replays * len(self._plans), sets.without_room * sets.set_bytes)
        if self.lost_replays:
            slots = f"all {self._slots} slots were taken for {sets.without_slot}" if sets.without_slot else ""
            room = f"max_bytes was used up for {sets.without_room}" if sets.without_room else ""
            _log.warning(
                "graph %s: %d of %d traced replays ran unrecorded%s%s",
                self.name,
                self.lost_replays,
                self._ring.replays + self._num_without_room,
                f" ({self.lost_records} records)" if self.lost_records else "",
                "".join(f"; {why}" for why in (slots, room) if why),
            )

    def _capture_instance(self, instance: str, run: Callable[[], None]) -> Any:
        import torch

        graph = torch.cuda.CUDAGraph()
        self._capturing, self._thread = instance, threading.get_ident()
        gc.collect()  # freeing device memory, as of another graph, would invalidate a stream capture
        try:
            with (
                without_collector(),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
                self._nodes_around() if instance == "traced" else contextlib.nullcontext(),
            ):
                run()
        finally:
            self._capturing = ""
        return graph

    @contextlib.contextmanager
    def _nodes_around(self) -> Iterator[None]:
        """Captures the nodes of the traced instance around run().

        If run() fails, the ring's nodes are joined again, so that run()'s own error is the one reported.
        """
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        self._ring.begin_capture(stream)
        try:
            yield
        finally:
            self._ring.end_capture(stream)


class UntracedGraph(TracedGraph):
    """A CUDA graph of a capture that is off: the untraced instance alone."""

    lost_replays = 0
    lost_records = 0

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.name = name
        self._is_open = False
        self._untraced = self._capture_instance("untraced", run)
