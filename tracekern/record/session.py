"""A capture: `with tracekern.capture(path) as capture:` around a workload, `capture.launch(...)` for each kernel.

Nothing here raises in the middle of a run because of the capture itself: what cannot be recorded is counted and told
later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tracekern.comm.device import CaptureDevice, open_device
from tracekern.comm.group import Group, host_identity
from tracekern.dump import format as fmt
from tracekern.errors import BadInput
from tracekern.formatting import count
from tracekern.record.clock_samples import CaptureClocks
from tracekern.record.gather import how_to_save, leave_dump, save_torch_profile
from tracekern.record.launches import Kernel, Launches, check_epoch
from tracekern.record.selection import Selection
from tracekern.record.setup import Setup, check_about, is_text, list_of_names, opening_metadata, used_device
from tracekern.record.sinks import Sink, SinkChoice
from tracekern.segment.manifest import forget_old_capture
from tracekern.segment.unrecorded import why_refused
from tracekern.segment.writer import SegmentWriter

if TYPE_CHECKING:
    from tracekern.record.graphs import TracedGraph

CLOSE_TIMEOUT_S = 60.0
"""How long a capture that closes waits for the kernels that still run."""

_log = logging.getLogger("tracekern")
_active: list[Capture] = []
_still_written: list[SegmentWriter] = []
"""Of captures that closed while a kernel ran: they stay mapped, or that kernel would crash the process."""
_num_opened = 0


class Launch(NamedTuple):
    """What to hand to one kernel launch."""

    descriptor: int
    """For with_recorder() of tracekern.h, which picks the body to launch; 0: this launch is not recorded."""
    grid: int
    warps: int
    stream: int

    @property
    def traced(self) -> bool:
        return self.descriptor != 0


def open_capture() -> Capture | None:
    """The capture that is open in this process, or in the rank that it is a fork of."""
    return _active[0] if _active else None


def capture(
    path: str | Path,
    *,
    records_per_track: int | Literal["auto"] = "auto",
    keep: Literal["first", "last"] = "first",
    blocks: slice | None = None,
    roles: Sequence[str] | None = None,
    events: Sequence[str] | None = None,
    every: int = 1,
    max_bytes: int = 1 << 30,
    settings: dict[str, Any] | None = None,
    command: str | None = None,
    clocks: bool = True,
    host_spans: int = 10_000,
    device: CaptureDevice | Literal["cpu", "cuda"] | None = None,
    sink: Sink = "auto",
    load: Sequence[Callable[[], None]] = (),
) -> Capture:
    """A capture into directory `path`, to be used as a context manager; collective over the ranks of the run.

    records_per_track: "auto" gives what `capture.counting()` found and a quarter more, or 1024 where nothing was
    counted, and a flight recorder 256.
    keep: what stays where a track is full: its first records, or, for a flight recorder, its last; that one drops
    its oldest launches, too, where max_bytes is used up.
    blocks, roles, events: record these only, of an empty list none. every: record each Nth launch of a name. max_bytes:
    cap of this rank's memory. settings: anything that JSON holds, about the workload. clocks: sample the ranks' clocks.
    host_spans: room for ranges. device: what the kernels run on: a communicator's device, "cuda" for torch's current
    one, or "cpu" with the host's own clock; without, "cuda" if this process has used torch.cuda. sink: "host" or
    "device" memory for the records; "auto" takes the device's for kernels that counting() found to record too fast for
    the bus; that of a flight recorder is held by a process beside this one, so that it outlives a trap and a killed
    rank. load: called when the capture opens, to load the kernels' two bodies: loading one later may have to wait for a
    kernel that spins.
    Raises BadInput for arguments that cannot be used.
    """
    selection = Selection(
        records_per_track, blocks, list_of_names("roles", roles), list_of_names("events", events), every, keep
    )
    about: dict[str, Any] = {"keep": keep, "roles": selection.roles, "settings": settings or {}}
    about["command"] = shlex.join(sys.argv) if command is None else command
    check_about(settings, command)
    setup = Setup(device or used_device(), sink, max_bytes, host_spans, clocks, load)
    return Capture(Path(path).absolute(), selection, about, setup)


class Capture:
    """An open capture of this rank; made by `capture()`."""

    def __init__(self, directory: Path, selection: Selection, about: dict[str, Any], setup: Setup) -> None:
        self.directory = directory
        self._selection = selection
        self._about = about
        self._setup = setup
        self._clocks = CaptureClocks(str(directory))
        self._is_counting = False
        self._pid = 0
        self._is_fork_told = False
        self._graphs: list[TracedGraph] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Capture:
        if _active:
            is_ours = _active[0]._pid == os.getpid()
            what_to_do = "close it first" if is_ours else "this is a fork of its rank: fork before it opens"
            raise BadInput(f"{self.directory}: a capture into {_active[0].directory} is open; {what_to_do}")
        self.group = Group.discover()
        with contextlib.ExitStack() as undo:
            undo.callback(self.group.close)
            self.run_id, self._one_host = self._meet()
            self.device = open_device(self._setup.device, self.group)
            with self.group.in_step():  # then all segments are there
                self._open(undo)
            if self._setup.clocks and self.group.is_connected:
                self._clocks.open(self.device, self.segment, self.group, self.run_id, self._one_host)
            undo.pop_all()
        return self

    def _open(self, undo: contextlib.ExitStack) -> None:
        """What each rank does by itself. undo: gets what takes it back."""
        setup = self._setup
        self._sinks = SinkChoice(setup.sink, self.device.memory.mirror is not None, together=self._is_ring)
        about = opening_metadata(
            self.run_id, self.group, self.device, self.directory, "ring" if self._is_ring else "wide"
        )
        self.segment = SegmentWriter.create(
            self.run_id, self.group.rank, about | self._about, setup.max_bytes, setup.host_spans
        )
        undo.callback(self.segment.close)
        undo.callback(self.device.memory.detach)
        undo.callback(self.segment.unlink)
        self._launches = Launches(self.segment, self.device, self._selection, self._sinks)
        self._pid = os.getpid()
        _active.append(self)
        undo.callback(_active.remove, self)
        self.device.memory.attach(self.segment)
        if self._sinks.needs_mirror():
            self._open_mirror()
        for load in setup.load:
            load()
        self._make_room()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            return  # a fork of the rank leaves the block: the capture is the rank's
        is_saved = False
        try:
            in_order = self._stop(kind is None)
            with self._lock:  # another thread may be about to leave a range
                self.segment.header["state"] = fmt.SegmentState.CLOSED
            leave_dump(self.group, self.segment, self.directory, self._one_host, in_order)
            self.segment.header["saved"] = 1
            is_saved = True
        except BadInput as problem:  # its text is the last that somebody sees
            raise BadInput(f"{problem}; {how_to_save(self.run_id)}") from problem
        finally:
            with self._lock:  # another thread may be in a launch
                _active.remove(self)
            if not is_saved:
                _log.warning("capture %s: %s", self.directory, how_to_save(self.run_id))
            elif self.group.is_connected or os.environ.get("TRACEKERN_KEEP_SEGMENT") != "1":
                self.segment.unlink()  # else the launcher, who writes the manifest, finds the capture by it
            self.device.memory.detach()
            if self._launches.is_any_running():
                _still_written.append(self.segment)
            self.segment.close()
            self.group.close()
        if why := why_refused(self.segment.header, self._selection.keep):
            _log.warning("capture %s: %s", self.directory, why)
        _log.info("capture %s: rank %d held %d bytes", self.directory, self.group.rank, self.footprint_bytes)

    def _stop(self, in_order: bool) -> bool:
        """Brings in what was recorded and takes the last clock samples. Returns whether all ranks close in order."""
        is_idle = self.device.streams.is_idle_within(CLOSE_TIMEOUT_S)
        trouble = self.device.trouble()
        if trouble or not is_idle:
            why = trouble or f"after {CLOSE_TIMEOUT_S:.0f} s kernels still run"
            _log.warning("capture %s: rank %d: %s; what it recorded is kept", self.directory, self.group.rank, why)
        self._collect(is_idle)  # before a peer that hangs keeps this rank until it is killed
        for name in self._launches.unknown_names():
            _log.warning(
                "capture %s: no kernel has an event or role %r; nothing of it was recorded", self.directory, name
            )
        return self._clocks.close(in_order and not trouble)

    @property
    def _is_ring(self) -> bool:
        return self._selection.keep == "last"

    @property
    def footprint_bytes(self) -> int:
        """Bytes of this rank's segment that are in use now."""
        return self.segment.footprint_bytes

    def launch(
        self,
        name: str,
        *,
        grid: int,
        warps: int,
        stream: int = 0,
        events: str | dict[str, Any],
        roles: Sequence[str] = (),
        epoch: int = 0,
        ahead: bool = False,
    ) -> Launch:
        """Reserve the region of one launch of `grid` blocks with `warps` warps each; call it right before the launch.

        events: what the kernel's describe_events() returns. epoch: of its signals and waits; in a graph, where no host
        knows it, the kernel's Recorder tells. stream: where the kernel is launched, by one thread at a time; a flight
        recorder uses regions again by how far it has come. ahead: the launch of this stream asked for before this one
        is still to be started: so all but the first of several asked for at once. The region is this launch's alone.
        """
        check_epoch(name, epoch)
        if (self not in _active or os.getpid() != self._pid) and not self._is_ours(f"launch({name!r})"):
            return Launch(0, grid, warps, stream)
        kernel = Kernel(name, grid, warps, stream, events, roles)
        with self._lock:
            descriptor = self._region_of(kernel, epoch, ahead) if self in _active else 0  # it may be closed by now
        return Launch(descriptor, grid, warps, stream)

    def _region_of(self, kernel: Kernel, epoch: int, ahead: bool) -> int:
        """Launch.descriptor: the address of the launch's, plus 1 where the body of a ring is to run."""
        if self._graphs and self._graphs[-1].is_capturing:
            address = self._graphs[-1].add_launch(self._launches.plan(kernel))
        elif self.device.streams.is_captured():
            # All replays of a graph that capture.graph() does not know would write to one region.
            told = "launch %s: in a CUDA graph that capture.graph() did not make; it runs unrecorded"
            _log.warning(told, kernel.name)
            return 0
        else:
            self._clocks.before_launch()
            if self._is_counting:
                return self._launches.count(kernel)  # a ring counts nothing
            address = self._launches.take(kernel, epoch, ahead)
        return address + 1 if address and self._is_ring else address

    def graph(self, run: Callable[[], None], *, name: str = "graph", slots: int = 1024) -> TracedGraph:
        """Captures `run`, which starts kernels on torch's current stream, as a CUDA graph: once traced, once not.

        Call run() once before, so that all kernels are loaded. It gets its descriptors from launch() as ever; the names
        of its launches become NAME/LAUNCH. slots: how many replays the host may be ahead of the GPU without a loss.
        Raises BadInput without a GPU.
        """
        from tracekern.record.graphs import TracedGraph

        if not self._is_ours(f"graph({name!r})"):
            raise BadInput(f"capture.graph({name!r}): in a fork of the rank, which can use no GPU; fork before")
        if self.device.backend != "cuda":
            raise BadInput(f"capture.graph({name!r}): the {self.device.backend} backend has no graphs; it needs a GPU")
        if slots < 1:
            raise BadInput(f"capture.graph({name!r}): slots={slots}; wanted 1 or more")
        graph = TracedGraph(self.segment, self.device, name, slots, self._is_ring, self._before_replay)
        with self._lock:
            self._graphs.append(graph)
        try:
            graph.capture(run)
        except BaseException:
            self._graphs.remove(graph)
            raise
        return graph

    def _before_replay(self, lay_ready: Callable[[], bool]) -> bool:
        """Clocks are sampled between replays as between launches, and regions reserved."""
        with self._lock:
            self._clocks.before_launch()
            return lay_ready()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Launches inside are counted, not recorded; then "auto" gives each name what its fullest track needed.

        The kernels have to be through when the block ends: synchronise the device inside it.
        """
        if not self._is_ours("counting()"):
            yield
            return
        first = int(self.segment.header["num_launches"])
        was_counting, self._is_counting = self._is_counting, True
        try:
            yield
        finally:
            self._is_counting = was_counting
        needed_mirror = self._sinks.needs_mirror()
        _log.info("capture %s: records per track: %s", self.directory, self._launches.read_counts(first))
        if self._sinks.needs_mirror() and not needed_mirror:
            self._open_mirror()
        with self._lock:
            self._launches.reserve_counted()

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """A named span of this host thread, drawn beside the kernels; a long name is cut."""
        if not is_text(name):
            raise BadInput(f"range({name!r}): wanted a name")
        if not self._is_ours(f"range({name!r})"):
            yield
            return
        start_ns = time.time_ns()
        try:
            yield
        finally:
            with self._lock:
                if self.segment.header["state"] == fmt.SegmentState.OPEN:  # else the capture is packed already
                    self.segment.append_host_span(name, threading.get_native_id(), start_ns, time.time_ns())

    def add_torch_profile(self, profile: Any) -> Path:
        """Put a torch.profiler run into the capture: the profiler after its block, or the path of its Chrome trace.

        Returns the file in the capture directory. Raises BadInput when there is no trace.
        """
        return save_torch_profile(profile, self.directory / fmt.torch_profile_file_name(self.group.rank))

    def sample_clocks(self) -> None:
        """One round of clock samples, now; collective. The capture does so itself at its ends and every few seconds."""
        if self._is_ours("sample_clocks()"):
            self._clocks.sample()

    def _is_ours(self, call: str) -> bool:
        """Whether the rank itself calls. A fork of it would write over what it records: there nothing is recorded.

        Raises BadInput outside the `with` block.
        """
        if self not in _active:
            raise BadInput(f"{self.directory}: {call} outside the capture's `with` block")
        if os.getpid() == self._pid:
            return True
        if not self._is_fork_told:
            self._is_fork_told = True
            _log.warning("capture %s: %s in a fork of its rank: nothing of it is recorded", self.directory, call)
        return False

    def _make_room(self) -> None:
        """In the directory. All else that may be wrong was found before: an earlier capture there goes only now."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            forget_old_capture(self.directory, self.group.rank, self.group.num_ranks)
        except (OSError, ValueError) as error:  # the second of a name with a zero byte
            why = "it is a file" if os.path.isfile(self.directory) else getattr(error, "strerror", None) or error
            raise BadInput(f"{self.directory}: cannot be written ({why}); choose another directory") from None

    def _meet(self) -> tuple[str, bool]:
        """The run's name, the same on all ranks, and whether all are on one host."""
        global _num_opened
        ordinal, _num_opened = _num_opened, _num_opened + 1
        base = re.sub(r"[^A-Za-z0-9_-]", "_", os.environ.get("TRACEKERN_RUN_ID", ""))
        if not base and not self.group.is_connected:
            raise BadInput(
                f"rank {self.group.rank} of {self.group.num_ranks} by environment alone: initialise torch.distributed "
                "before the capture, or start the ranks with tracekern's launcher"
            )
        run_id = base + (f".{ordinal}" if ordinal else "") if base else f"{int(time.time()):x}-{secrets.token_hex(4)}"
        met = self.group.all_gather((run_id, host_identity()))
        return met[0][0], len({host for _, host in met}) == 1

    def _open_mirror(self) -> None:
        """Takes device memory for records, of a flight recorder such that outlives this process."""
        mirror = self.device.memory.mirror
        assert mirror is not None  # a sink that needs one is refused where there is none
        reason = mirror.start_keeper(self.segment) if self._is_ring else mirror.open()
        if reason and self._setup.sink == "device":
            raise BadInput(f"keep={self._selection.keep!r} with sink='device': {reason}; take sink='host'")
        if reason:
            _log.warning("capture %s: records stay in host memory: %s", self.directory, reason)
            self._sinks.has_mirror = False

    def _collect(self, is_idle: bool) -> None:
        """Brings back what is in device memory. Warns of what a device that no longer answers keeps."""
        try:
            for graph in self._graphs:
                graph.close(is_idle)
        except RuntimeError as error:
            _log.warning("capture %s: the last replay of a graph was not counted: %s", self.directory, error)
        try:
            self.device.memory.collect(self.segment)
        except RuntimeError as error:
            lost = [entry for entry in self.segment.recorded_launches() if entry["flags"] & fmt.ENTRY_MIRRORED]
            if lost:
                what = f"the device does not answer: {error}; lost with its memory: {count(len(lost), 'launch')}"
                _log.warning("capture %s: %s", self.directory, what)
