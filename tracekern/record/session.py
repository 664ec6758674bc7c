"""A capture: `with tracekern.capture(path) as capture:` around a workload, `capture.launch(...)` for each kernel.

What finds no room is counted and reported later. What fails goes through the capture's `Guard`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from tracekern.comm.devices.device import CaptureDevice, open_device
from tracekern.comm.devices.this_thread import this_resident
from tracekern.comm.ranks.group import Group
from tracekern.dump import format as fmt
from tracekern.errors import BadInput, one_line
from tracekern.host_clock import anchor
from tracekern.record import claims
from tracekern.record.attempt_choice import Claim, agree_on_attempt, lock_attempt
from tracekern.record.clock_samples import CaptureClocks
from tracekern.record.gather import collect_records, how_to_save, leave_dump, save_torch_profile
from tracekern.record.guard import Guard, OnError, nothing
from tracekern.record.host_span import HostSpan
from tracekern.record.launches import Kernel, Launches, LaunchHandle, check_epoch, check_key
from tracekern.record.selection import Detail, Selection
from tracekern.record.setup import (
    Setup,
    about_run,
    check_built,
    directory_of,
    is_text,
    list_of_names,
    make_run_id,
    opening_metadata,
    used_device,
)
from tracekern.record.sinks import Sink, SinkChoice
from tracekern.segment.directory_lock import DirectoryLock
from tracekern.segment.evidence import make_way
from tracekern.segment.lacking import lacking_bodies
from tracekern.segment.manifest import forget_old_capture
from tracekern.segment.unrecorded import why_refused
from tracekern.segment.writer import SegmentWriter

if TYPE_CHECKING:
    from tracekern.record.graphs import TracedGraph

CLOSE_TIMEOUT_S = 60.0
"""How long a closing capture waits for kernels that still run, then for the other ranks to close theirs."""

_log = logging.getLogger("tracekern")
_active: dict[Any, Capture] = {}
"""The open capture of this process, or of each resident rank in it."""
_still_written: list[SegmentWriter] = []
"""Segments of captures that closed while a kernel ran, or was to start. They stay mapped, or it would crash."""
_num_opened = Counter[Any]()


def _leave_short_way() -> None:
    """In a fork nothing is recorded: it would overwrite what its rank does."""
    for session in _active.values():
        session.set_short_way(False)


os.register_at_fork(after_in_child=_leave_short_way)


def open_capture() -> Capture | None:
    """Returns the capture that is open in this process, or in the rank that it was forked from; None without one.

    In the thread of a resident rank it is that rank's.
    """
    return _active.get(this_resident())


def capture(
    path: str | Path,
    *,
    records_per_track: int | Literal["auto"] = "auto",
    keep: Literal["first", "last"] = "first",
    clock: Literal["realtime", "cycles"] = "realtime",
    detail: Detail = "work",
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
    group: Any = None,
    sink: Sink = "auto",
    preload: Sequence[Callable[[], None]] = (),
    on_error: OnError = "raise",
) -> Capture:
    """Records what happens inside its `with` block into a directory: `with tracekern.capture(...) as capture:`.

    All ranks of a run, or of `group`, open it together, with the same path. The directory gets one dump for each rank.

    Args:
        path: The directory. Dumps of an earlier run in it are replaced, but faults are not (docs/reliability.md).
        records_per_track: Room of each track: one record a span, two in a flight recorder or in cycles. "auto" takes
            what `counting()` found and a quarter more, 1024 where nothing was counted, and 256 for a flight recorder.
        keep: Which records of a full track stay; "last" is a flight recorder, which also gives up its oldest launches.
        clock: "cycles" takes times from the core's counter, which tells spans of a few ns apart: see docs/clocks.md.
        detail: "peers" leaves out events above level 1, "all" adds how warps with nothing to do wait (Detail).
        blocks: Record only these blocks.
        roles: Record only warps of these roles. An empty list selects none.
        events: Record only these events. An empty list selects none.
        every: Record every Nth launch of each name.
        max_bytes: Limit of this rank's memory for records.
        settings: Facts about the workload, stored with the capture. Anything that JSON can hold; NaN as text.
        command: The command line, stored with the capture. That of this process where None.
        clocks: Sample the ranks' clocks, so that they can be put on one time axis.
        host_spans: Room for this number of `range()` spans; a flight recorder keeps the last ones.
        device: The `device` of a Communicator, "cuda" for torch's current GPU, or "cpu". None: "cuda" if torch used it.
        group: Ranks that capture, each group at its path: a ProcessGroup, a list of the run's ranks or a Group; or all.
        sink: Where records go: "host" or "device" memory. "auto" takes device memory for kernels that `counting()`
            found to record faster than the bus can carry. That of a flight recorder survives a trap and the rank.
        preload: Functions that load kernels' bodies, called at the opening. A later load may wait for one that spins.
        on_error: With "warn" a failure of the capture is a warning, and the run goes on untraced: docs/reliability.md.

    Raises:
        BadInput: An argument cannot be used, or another capture is open in this process.
    """
    with (guard := Guard(str(path), on_error)):
        check_built()
        names = list_of_names("roles", roles), list_of_names("events", events)
        selection = Selection(records_per_track, blocks, *names, every, keep, clock, detail)
        setup = Setup(device or used_device(), sink, max_bytes, host_spans, clocks, preload, group)
        return Capture(directory_of(path), selection, about_run(selection, settings, command), setup, guard)
    return Capture(Path(str(path)), Selection(), {}, Setup(group=group), guard)  # it never opens


class Capture:
    """An open capture of this rank. Made by `tracekern.capture()`."""

    def __init__(
        self, directory: Path, selection: Selection, about: dict[str, Any], setup: Setup, guard: Guard
    ) -> None:
        self.directory = directory
        self.group = Group(0, 1)
        self._guard = guard
        self._selection, self._is_ring = selection, selection.keep == "last"
        self._about = about
        self._setup = setup
        self._clocks = CaptureClocks(str(directory))
        self._is_counting = False
        self._num_given_up = 0
        self._is_used = False
        self._depth = 0
        self._pid = 0
        self._rank_of_process: Any = None
        self._is_fork_told = False
        self._graphs: list[TracedGraph] = []
        self._short_way: Callable[..., int] | None = None
        self.is_in_short_way = False
        """Whether a range that begins now needs no other checks."""
        self._told_of = set[str]()
        self._lock = threading.Lock()
        self.peers_limit_s = CLOSE_TIMEOUT_S
        self.handed_out: Collection[int] = ()
        """Descriptors of launches whose kernels may start after this capture has closed."""
        self.on_rival: Callable[[Path], None] | None = None
        """Closes this capture where the program opens another one, in that directory; else the other is refused."""

    @property
    def detail(self) -> Detail:
        """What `tracekern.capture()` was given as `detail`."""
        return self._selection.detail

    def __enter__(self) -> Capture:
        with self._guard:
            if self._is_used:
                raise BadInput(f"{self.directory}: a capture is entered once; call tracekern.capture() for another one")
            self._enter()
        self._is_used = True
        self._depth += 1
        return self

    def _enter(self) -> None:
        """Opens the capture on all ranks, or on none."""
        if (other := open_capture()) is not None and other.on_rival is not None:
            if other._pid == os.getpid():
                other.on_rival(self.directory)
            else:  # that of the rank that this is a fork of
                _active.pop(this_resident())
        if (other := open_capture()) is not None:
            what_to_do = (
                "close it first" if other._pid == os.getpid() else "this is a fork of its rank: fork before it opens"
            )
            raise BadInput(f"{self.directory}: a capture into {other.directory} is open; {what_to_do}")
        self.group = Group.another(self._setup.group)
        with contextlib.ExitStack() as undo:
            undo.callback(self.group.close)
            with self.group.in_step():
                self._guard.raise_again()  # what capture() found on this rank
                make_way(self.directory, self._about["command"])  # before rank 0 looks for evidence there
            self._meet()
            self.device = open_device(self._setup.device, self.group)
            with self.group.in_step():  # afterwards all segments exist
                self._open(undo)
            if self._setup.clocks:
                self._clocks.open(self.device, self.segment, self.group, self.run_id)
                self._clocks.shorten(self._launches.table)
            undo.pop_all()
        self._guard.on_off = lambda: self.set_short_way(False)
        self._choose_way()

    def _open(self, undo: contextlib.ExitStack) -> None:
        """Opens this rank's part of the capture. `undo` gets the calls that close it again."""
        setup = self._setup
        if not self.group.is_connected:
            self._directory_lock, self.directory = lock_attempt(self.directory, self._claim)
            undo.callback(self._directory_lock.release)
        self._sinks = SinkChoice(setup.sink, self.device.memory.mirror is not None, together=self._is_ring)
        about = opening_metadata(self.run_id, self.group, self.device, self.directory, self._selection.record_format)
        about |= self._claim.about()
        self.segment = SegmentWriter.create(
            self.run_id, self.group.world_rank, about | self._about, setup.max_bytes, setup.host_spans
        )
        undo.callback(self.segment.close)
        undo.callback(self.device.memory.detach)
        undo.callback(self.segment.unlink)
        self._lock = self.segment.lock
        self._launches = Launches(self.segment, self.device, self._selection, self._sinks, self._guard.warns)
        self._pid = os.getpid()
        undo.callback(setattr, self, "_pid", 0)
        self._rank_of_process = this_resident()
        _active[self._rank_of_process] = self
        undo.callback(_active.pop, self._rank_of_process)
        self.device.memory.attach(self.segment)
        if self._sinks.needs_mirror():
            self._sinks.open_mirror(self.device.memory.mirror, self.segment, self.directory)
        for preload in setup.preload:
            preload()
        self._make_room(undo)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._guard.closing(error):
            if self._depth < 1:
                raise BadInput(f"{self.directory}: the capture's `with` block is left twice, or was never entered")
            self._depth -= 1
            # A fork may leave the block of its rank, to which the capture belongs.
            if self._depth == 0 and self._is_open and os.getpid() == self._pid:
                self._close(kind is None)

    def _close(self, in_order: bool) -> None:
        """Saves what was recorded and gives everything back. in_order: no error is on its way out of the block."""
        is_saved = False
        self.set_short_way(False)
        self._guard.on_off = nothing  # else both would live until the collector comes
        is_gone = self.group.forget_if_gone()
        try:
            in_order = self._stop(in_order and not is_gone)
            with self._lock:  # another thread may be leaving a range
                self.segment.finish(self._num_given_up)
            leave_dump(self.group, self.segment, self.directory, self._one_disk, in_order, is_gone)
            self.segment.mark_saved()
            is_saved = True
        except Exception as problem:  # the last message that the user sees
            raise BadInput(f"{one_line(problem)}; {how_to_save(self.run_id)}") from problem
        except BaseException:
            _log.warning("capture %s: %s", self.directory, how_to_save(self.run_id))
            raise
        finally:
            self._give_back(is_saved)
        if not self._num_given_up and (why := why_refused(self.segment.header, self._selection.keep)):
            _log.warning("capture %s: %s", self.directory, why)
        _log.info("capture %s: rank %d held %d bytes", self.directory, self.group.world_rank, self.footprint_bytes)

    def _give_back(self, is_saved: bool) -> None:
        with contextlib.ExitStack() as rest:  # all of it, whatever fails
            with self._lock:  # another thread may be in a launch
                _active.pop(self._rank_of_process)
            rest.callback(self.group.close)
            rest.callback(self.segment.close)
            is_written = self._launches.is_any_to_start(self.handed_out)
            if is_written or self._launches.is_any_running():
                _still_written.append(self.segment)
            rest.callback(self.device.memory.detach, is_written)
            rest.callback(self._directory_lock.release)
            # Else the launcher, which writes the manifest, finds the capture by it.
            if is_saved and (self.group.is_connected or os.environ.get("TRACEKERN_KEEP_SEGMENT") != "1"):
                rest.callback(self.segment.unlink)

    def _stop(self, in_order: bool) -> bool:
        """Collects the records and takes the last clock samples. Returns whether all ranks close in order."""
        is_idle = self.device.streams.is_idle_within(CLOSE_TIMEOUT_S)
        self._launches.stop_host_tracks()
        problem = self.device.error()
        if problem or not is_idle:
            why = problem or f"after {CLOSE_TIMEOUT_S:.0f} s kernels still run"
            told = "capture %s: rank %d: %s; what it recorded is kept"
            _log.warning(told, self.directory, self.group.world_rank, why)
        collect_records(
            self.device, self.segment, self._graphs, is_idle, self.directory
        )  # first: a peer that hangs may hold this rank until it is killed
        for lacked in lacking_bodies(self.segment):
            _log.warning("capture %s: %s", self.directory, lacked["text"])
        for name in self._launches.unknown_names():
            told = "capture %s: no kernel has an event or role %r; nothing of it was recorded"
            _log.warning(told, self.directory, name)
        return self._clocks.close(in_order and not problem, self.peers_limit_s)

    @property
    def _is_open(self) -> bool:
        return _active.get(self._rank_of_process) is self

    @property
    def _is_recording(self) -> bool:
        return self._is_open and not self._guard.is_off

    @property
    def keeps_host_tracks(self) -> bool:
        """Whether it makes sense to record the run's own threads: launches are not counted, and their records stay."""
        return not self._is_counting and not self._is_ring

    @property
    def footprint_bytes(self) -> int:
        """Bytes of memory that this rank's records take now."""
        return self.segment.footprint_bytes if self._pid else 0

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
        key: str = "",
    ) -> LaunchHandle:
        """Reserves the region of one kernel launch. Call it right before each launch.

        Args:
            name: Name of the kernel in traces and reports.
            grid: Number of blocks.
            warps: Warps of a block.
            stream: Handle of the stream that the kernel is launched on. One thread at a time launches on a stream.
            events: The kernel's event table, as describe_events() of tracekern.h returns it.
            roles: Names of the roles of the kernel's warps, by number.
            epoch: Epoch of the kernel's signals and waits. In a CUDA graph the kernel's Recorder states it instead.
            ahead: True where the previous launch asked for on this stream has not been started yet: for all but the
                first of several launches that are asked for at once.
            key: What this launch belongs to, such as "layer 3" or a request; `info` and `report --key`
                select by it. It is cut after 95 bytes.

        Returns:
            The launch. Its descriptor is 0, and the untraced body runs, where the capture does not select this launch
            or has no room for it.

        Raises:
            BadInput: Called outside the capture's `with` block, or with an argument that cannot be used.
        """
        short_way = self._short_way
        if short_way is not None and not self.device.streams.is_captured():
            descriptor = short_way(name, grid, warps, stream, events, roles, epoch, key, ahead)
            if descriptor >= 0:
                return LaunchHandle(descriptor, grid, warps, stream)
        descriptor = 0
        with self._guard:
            check_epoch(name, epoch)
            if key != "":
                check_key(name, key)
            if (self._is_recording and os.getpid() == self._pid) or self._is_ours(f"launch({name!r})"):
                with self._lock:
                    if self._is_open:  # another thread may have closed it by now
                        kernel = Kernel(name, grid, warps, stream, events, roles)
                        descriptor = self._region_of(kernel, epoch, ahead, key)
        if self._guard.is_off:
            self._num_given_up += 1
        return LaunchHandle(descriptor, grid, warps, stream)

    def _choose_way(self) -> None:
        """Says whether launches and ranges may be written by one call now (csrc/apis/launches.cpp)."""
        is_graph = bool(self._graphs) and self._graphs[-1].is_capturing
        self.set_short_way(self._is_recording and not self._is_counting and not is_graph)

    def set_short_way(self, is_open: bool) -> None:
        """Opens or closes it. Nothing is written once it is closed."""
        self.is_in_short_way = is_open
        self.segment.open_short_way(is_open)
        self._short_way = self._launches.table.launch if is_open else None

    def _region_of(self, kernel: Kernel, epoch: int, ahead: bool, key: str) -> int:
        """Returns LaunchHandle.descriptor."""
        if self._graphs and self._graphs[-1].is_capturing:
            return self._graphs[-1].add_launch(replace(self._launches.plan(kernel), key=key))
        if self.device.streams.is_captured():
            # All replays of a graph that was not made by capture.graph() would write to one region.
            if kernel.name not in self._told_of:  # a server captures hundreds
                self._told_of.add(kernel.name)
                told = "launch %s: in a CUDA graph that capture.graph() did not make; it runs unrecorded"
                _log.warning(told, kernel.name)
            return 0
        self._clocks.before_launch()
        if self._is_counting:
            return self._launches.count(kernel)
        return self._launches.take(kernel, epoch, ahead, key)

    def host_tracks(
        self, name: str, events: str, tracks: Sequence[str], records_per_track: int, stop: Callable[[], None] = nothing
    ) -> int:
        """Reserves tracks that threads of this process write with a Recorder of format span, in host time.

        Returns the address of their LaunchDescriptor, as of a block with a warp for each; 0 without room. stop: ends
        their Recorders if that is not done before the capture closes. Raises BadInput outside of its `with` block.
        """
        with self._guard, self._lock:
            if self._is_ours(f"host_tracks({name!r})"):
                return self._launches.take_host_tracks(name, events, tracks, records_per_track, stop)
        return 0

    def graph(self, run: Callable[[], None], *, name: str = "graph", slots: int = 1024) -> TracedGraph:
        """Makes a CUDA graph of what `run` launches on torch's current stream, in two instances: traced and untraced.

        Call run() once before, so that all kernels are loaded. Inside it, launches come from `launch()` as usual.

        Args:
            run: Starts the kernels.
            name: The graph's name. Its launches are called NAME/LAUNCH.
            slots: How many replays the host may be ahead of the GPU before records are lost.

        Raises:
            BadInput: There is no GPU, or run() launches nothing through `launch()`.
        """
        from tracekern.record.graphs import UntracedGraph

        with self._guard:
            if self._is_ours(f"graph({name!r})"):
                return self._traced_graph(self._guard.of_user(run), name, slots)
            if not self._guard.is_off:
                why = "in a fork of the rank, which cannot use a GPU"
                raise BadInput(f"capture.graph({name!r}): {why}; call it in the rank itself")
        return UntracedGraph(name, run)

    def _traced_graph(self, run: Callable[[], None], name: str, slots: int) -> TracedGraph:
        from tracekern.record.graphs import TracedGraph, check_graph

        check_graph(name, slots, self.device.backend)
        graph = TracedGraph(self.segment, self.device, name, slots, self._is_ring, self._before_replay)
        with self._lock:
            self._graphs.append(graph)
        self.set_short_way(False)
        try:
            graph.capture(run)
        except BaseException:
            self._graphs.remove(graph)
            raise
        finally:
            self._choose_way()
        return graph

    def _before_replay(self, lay_ready: Callable[[], bool]) -> bool:
        """Samples the clocks if due, as between launches, then reserves the replay's regions with `lay_ready`."""
        with self._guard, self._lock:
            if self._is_recording:
                self._clocks.before_launch()
                return lay_ready()
        return False

    @contextlib.contextmanager
    def counting(self, repeats: int = 1) -> Iterator[None]:
        """Counts the records of launches inside the block instead of keeping them.

        Afterwards `records_per_track="auto"` gives the launches of each name room for what their fullest track needed,
        and room for as many launches as were counted is reserved, so that none of them waits for the recorder.
        Synchronize the device before the block ends: kernels have to be finished by then.

        repeats: How often the launches of the block come again: 100 where one step is counted and 100 are recorded.
        """
        first = -1
        with self._guard:
            if not isinstance(repeats, int) or repeats < 1:
                raise BadInput(f"counting(repeats={repeats!r}): wanted 1 or more")
            if self._is_ours("counting()"):
                first = int(self.segment.header["num_launches"])
        was_counting, self._is_counting = self._is_counting, first >= 0
        if first >= 0:
            self._choose_way()
        try:
            yield
        finally:
            self._is_counting = was_counting
            if first >= 0 and self._is_open:
                self._choose_way()
        with self._guard:
            if first >= 0 and self._is_recording:
                self._use_counts(first, repeats)

    def _use_counts(self, first: int, repeats: int) -> None:
        """Makes room for `repeats` times what was counted from launch `first` on."""
        needed_mirror = self._sinks.needs_mirror()
        _log.info("capture %s: records per track: %s", self.directory, self._launches.read_counts(first))
        if self._sinks.needs_mirror() and not needed_mirror:
            self._sinks.open_mirror(self.device.memory.mirror, self.segment, self.directory)
        with self._lock:
            self._launches.reserve_counted(repeats)

    def range(self, name: str) -> HostSpan:
        """Records a span of this host thread, drawn beside the kernels. Long names are cut.

        It ends with the block. Kernels that the block only queued run later, unless it waits for them.
        """
        return HostSpan(self, name)

    def may_record_range(self, name: str) -> bool:
        """Returns whether a range that begins now is recorded. Raises BadInput for what is no name, or is too late."""
        with self._guard:
            if not is_text(name):
                raise BadInput(f"range({name!r}): wanted a name")
            return self._is_ours(f"range({name!r})")
        return False

    def end_range(self, name: str, begin_ns: int) -> None:
        """Records a range of this thread that began at a time of CLOCK_MONOTONIC and ends now."""
        if self.segment.host.add_span(name, begin_ns):
            return
        end_ns = time.monotonic_ns()
        with self._guard, self._lock:
            if self.segment.is_recording and os.getpid() == self._pid:  # a capture that is packed already takes no more
                ahead = anchor().ns
                self.segment.append_host_span(name, threading.get_native_id(), begin_ns + ahead, end_ns + ahead)

    def add_torch_profile(self, profile: Any) -> Path:
        """Adds the lanes of a torch.profiler run to the capture. Returns the file in the capture directory.

        Args:
            profile: The profiler, after its `with` block, or the path of a Chrome trace that it exported.

        Raises:
            BadInput: There is no trace, or another rank made it.
        """
        path = self.directory / fmt.torch_profile_file_name(self.group.world_rank)
        with self._guard:
            if not self._guard.is_off:
                save_torch_profile(profile, path, self.group)
        return path

    def sample_clocks(self) -> None:
        """Samples the ranks' clocks now. Called by all ranks together.

        A capture samples them itself when it opens, when it closes, and every few seconds between launches.
        """
        with self._guard:
            if self._is_ours("sample_clocks()"):
                self._clocks.sample()

    def _is_ours(self, call: str) -> bool:
        """Returns whether this process is the rank, and its capture not off.

        A fork would overwrite the rank's records, so it records nothing. Raises BadInput outside the `with` block.
        """
        if self._guard.is_off:
            return False
        if not self._is_open:
            raise BadInput(f"{self.directory}: {call} outside the capture's `with` block")
        if os.getpid() == self._pid:
            return True
        if not self._is_fork_told:
            self._is_fork_told = True
            _log.warning("capture %s: %s in a fork of its rank: nothing of it is recorded", self.directory, call)
        return False

    def _make_room(self, undo: contextlib.ExitStack) -> None:
        """Makes the directory, takes its lock and removes an earlier capture from it.

        It runs after all other checks, so that a mistake in the arguments costs no earlier capture.
        """
        if (group := self.group).is_connected:
            self._directory_lock = DirectoryLock(self.directory, self.run_id, *claims.advice_for(group))
            undo.callback(self._directory_lock.release)
        claims.refuse_second_claim(self.directory / fmt.dump_file_name(group.world_rank))
        replaced = None if group.rank else group.world_ranks[: None if self._one_disk else 1]
        forget_old_capture(self.directory, group.world_rank, replaced)

    def _meet(self) -> None:
        """Agrees with the other ranks on the run's name, on the directory, and whether all write to one. Collective."""
        ordinal, group = _num_opened[this_resident()], self.group
        _num_opened[this_resident()] += 1
        run_id = make_run_id(ordinal, group)
        self._claim = Claim.of_capture(self.directory, run_id, group.world_rank)
        self.directory, self.run_id, self._one_disk = agree_on_attempt(self.directory, self._claim, group, run_id)
