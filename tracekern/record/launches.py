"""The launches of a capture: what is recorded of each, where its records go, and how often each name was launched."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.dump.event_table import Members
from tracekern.errors import BadInput
from tracekern.record.regions import RegionQueue
from tracekern.record.selection import KernelTable, Selection
from tracekern.record.setup import is_text
from tracekern.record.sinks import SinkChoice
from tracekern.segment.launch_plan import LaunchPlan
from tracekern.segment.pack import is_of_launch
from tracekern.segment.writer import MAX_LAUNCHES

if TYPE_CHECKING:
    from tracekern._core import StreamProgress
    from tracekern.comm.devices.device import CaptureDevice
    from tracekern.segment.writer import SegmentWriter


_WHOLE = (int, Integral)
"""Types of a whole number. int comes first because isinstance() checks it several times faster than Integral."""
_ONLY_TELLS = 1 << 62
"""Added to a descriptor: TraceChoice::only_tells() of csrc/trace/trace_choice.h."""


class LaunchHandle(NamedTuple):
    """What one kernel launch needs. Made by `Capture.launch()`."""

    descriptor: int
    """Argument of `with_recorder()` in tracekern.h, which picks the body to launch. 0: this launch is not recorded."""
    grid: int
    """Number of blocks."""
    warps: int
    """Warps of a block."""
    stream: int
    """Handle of the stream."""

    @property
    def traced(self) -> bool:
        """Whether this launch is recorded."""
        return self.descriptor != 0


class Kernel(NamedTuple):
    """Arguments of capture.launch() shared by launches with equal regions."""

    name: str
    grid: int
    warps: int
    stream: int
    events: str | dict[str, Any]
    roles: Sequence[str]

    def as_key(self) -> Kernel:
        """Returns a hashable copy, with events as text and roles as a tuple. Raises BadInput if roles is no list."""
        _check_roles(self.name, self.roles)  # first: tuple() would turn a string into a list of letters
        events = json.dumps(self.events) if isinstance(self.events, dict) else self.events
        return self._replace(events=events, roles=tuple(self.roles))


class Launches:
    """Launches of one capture. The caller holds the capture's lock."""

    def __init__(
        self,
        segment: SegmentWriter,
        device: CaptureDevice,
        selection: Selection,
        sinks: SinkChoice,
        only_tells: bool = False,
    ) -> None:
        """only_tells: a launch whose kernel has no body for it runs untraced, instead of raising."""
        self._segment = segment
        self._only_tells = _ONLY_TELLS if only_tells else 0
        self._device = device
        self._selection = selection
        self._is_ring = selection.keep == "last"
        self._stop_writers: list[Callable[[], None]] = []
        self._sinks = sinks
        from tracekern import _core

        self.table = _core.LaunchTable(segment.host, selection.every)
        """Launches that take the short way, and how often each was asked for."""
        self._counters: dict[tuple[str, Members | None], int] = {}
        """(name, group) -> number of its counter in the table."""
        self._groups: dict[str, Members | None] = {}
        """Event table -> the group whose ranks its kernels count."""
        self._counted: dict[str, int] = {}
        self._tables: dict[tuple[str, tuple[str, ...]], KernelTable] = {}
        self._queues: dict[Kernel, RegionQueue] = {}
        self._dicts: dict[str, tuple[Any, str]] = {}
        """Kernel -> the table that the last launch gave as a dict, and its text."""
        self._to_come: Counter[Kernel] = Counter()
        self._progress: dict[int, StreamProgress] = {}

    def count(self, kernel: Kernel) -> int:
        """Returns LaunchHandle.descriptor of a launch that only counts its records; a ring counts nothing."""
        plan = self.plan(kernel, counted_only=True)
        self._to_come[kernel.as_key()] += 1
        return RegionQueue(self._segment, self._device, plan).take(0, plan.epoch)

    def reserve_counted(self, repeats: int) -> None:
        """Reserves regions for `repeats` times what was counted since the last call, all of them before it returns.

        Without room for all, each kernel gets the same part. A flight recorder, which uses regions again, gets a batch.
        """
        most = self._device.streams.max_regions_ahead if self._selection.keep == "last" else MAX_LAUNCHES
        wanted = {
            kernel: min(most, -(-count * repeats // self._selection.every)) for kernel, count in self._to_come.items()
        }
        num_bytes = sum(count * self.plan(kernel).region_bytes for kernel, count in wanted.items())
        part = min(1.0, self._segment.arena_room / max(num_bytes, 1))
        for kernel, count in wanted.items():
            self._queue(kernel).reserve(max(1, int(count * part)))
        self._to_come.clear()

    def take(self, kernel: Kernel, epoch: int, ahead: bool, key: str = "") -> int:
        """Returns LaunchHandle.descriptor of the group's next launch of this name; 0 if it is not recorded."""
        if self._is_ring:
            self._progress_on(kernel.stream).before_launch(ahead)
        if not isinstance(kernel.events, str):
            kernel = kernel._replace(events=self._text_of(kernel))
        queue = self._queue_of(kernel)
        sequence: int = self.table.count(queue.counter)
        return 0 if sequence % self._selection.every else queue.take(sequence, epoch, key)

    def _counter_of(self, kernel: Kernel) -> int:
        counted = kernel.name, self._group_of(kernel)
        if counted not in self._counters:
            self._counters[counted] = self.table.add_counter()
        return self._counters[counted]

    def _group_of(self, kernel: Kernel) -> Members | None:
        """Returns the group whose ranks the kernel counts, whichever of its communicators; None for all of the run."""
        events = str(kernel.events)
        if events not in self._groups:
            members = self._table(kernel.as_key()).members
            self._groups[events] = members and members._replace(generation=0)
        return self._groups[events]

    def _queue_of(self, kernel: Kernel) -> RegionQueue:
        """Returns the kernel's queue. Most launches take the fast path: a known key has been checked before."""
        try:
            known = self._queues.get(kernel)
        except TypeError:  # a list is not hashable
            known = self._queues.get(kernel._replace(roles=tuple(kernel.roles)))
        return known or self._queue(kernel.as_key())

    def _text_of(self, kernel: Kernel) -> str:
        """Returns the kernel's table as text. To compare a dict takes a tenth of the time of writing it as JSON."""
        if isinstance(kernel.events, str):
            return kernel.events
        seen, text = self._dicts.get(kernel.name, (None, ""))
        if seen != kernel.events:
            text = json.dumps(kernel.events)
            self._dicts[kernel.name] = copy.deepcopy(kernel.events), text
        return text

    def _queue(self, kernel: Kernel) -> RegionQueue:
        if kernel not in self._queues:
            from tracekern import _core

            used = _core.UsedRegions(self._progress_on(kernel.stream)) if self._is_ring else None
            queue = self._queues[kernel] = RegionQueue(self._segment, self._device, self.plan(kernel), used)
            queue.counter = self._counter_of(kernel)
            if queue.rows is not None:
                self.table.add(tuple(kernel), queue.rows, queue.counter, queue.choice_base, used)
        return self._queues[kernel]

    def _progress_on(self, stream: int) -> StreamProgress:
        """Returns the progress of a stream for a flight recorder, which uses regions again."""
        if stream not in self._progress:
            from tracekern import _core

            self._progress[stream] = _core.StreamProgress(lambda: self._device.streams.mark(stream))
        return self._progress[stream]

    def plan(self, kernel: Kernel, counted_only: bool = False) -> LaunchPlan:
        """Returns how launches of this kernel are recorded. Raises BadInput for arguments that cannot be used."""
        _check(kernel)
        table = self._table(kernel.as_key())
        mirrored = not counted_only and self._sinks.is_mirrored(kernel.name)
        return LaunchPlan(
            name=kernel.name,
            num_blocks=kernel.grid,
            warps_per_block=kernel.warps,
            records_per_track=0 if counted_only else self._selection.room(self._counted.get(kernel.name)),
            stream=kernel.stream,
            blocks=self._selection.pick_blocks(kernel.grid),
            event_mask=self._selection.event_mask(table),
            role_mask=self._selection.role_mask(table),
            events=table.events_json,
            roles=table.roles_json,
            choice=0
            if counted_only and self._selection.keep == "last"
            else self._selection.choice(table) | self._only_tells,
            flags=fmt.ENTRY_COUNTED_ONLY if counted_only else fmt.ENTRY_MIRRORED if mirrored else 0,
        )

    def take_host_tracks(
        self, name: str, events: str, tracks: Sequence[str], records_per_track: int, stop: Callable[[], None]
    ) -> int:
        """Returns what LaunchHandle.descriptor is to a launch. stop: ends what threads of the host write there."""
        check_name(name)
        table = self._table(Kernel(name, 1, len(tracks), 0, events, tracks).as_key())
        plan = LaunchPlan(
            name=name,
            num_blocks=1,
            warps_per_block=len(tracks),
            records_per_track=records_per_track,
            blocks=range(1),
            events=table.events_json,
            roles=table.roles_json,
            flags=fmt.ENTRY_BY_HOST,
        )
        self._stop_writers.append(stop)
        return RegionQueue(self._segment, self._device, plan).take(0, 0)

    def stop_host_tracks(self) -> None:
        """Has threads of the host end what they write."""
        for stop in self._stop_writers:
            stop()

    def read_counts(self, first_launch: int) -> dict[str, int]:
        """Reads the counts of launches from index `first_launch` on. Returns the records of the fullest track by name.

        Raises BadInput if a kernel is still running.
        """
        ticks_per_second = float(self._segment.metadata["clock"]["ticks_per_second"])
        needed_mirror = self._sinks.needs_mirror()
        for entry in self._segment.launches()[first_launch:]:
            name = entry["name"].decode(errors="replace")
            headers = self._segment.track_headers(entry)
            if _is_running(headers):
                raise BadInput(f"counting(): kernel {name!r} still runs; synchronise inside the block")
            self._counted[name] = max(self._counted.get(name, 0), int(headers["attempted"].max(initial=0)))
            events = self._segment.events(entry)["events"]
            classes = {event["class"] for bit, event in enumerate(events) if int(entry["event_mask"]) >> bit & 1}
            if self._selection.record_format == "cycles":
                classes = set()  # counted are records, a store each
            self._sinks.count(name, headers, classes, ticks_per_second)
        # Reserved regions have the old size. A ring keeps its regions unless the sink changes: a region that is given
        # up is lost, and a full flight recorder has no others.
        if self._selection.keep == "first" or self._sinks.needs_mirror() != needed_mirror:
            self._queues.clear()
            self.table.clear()
        return self._counted

    def is_any_running(self) -> bool:
        """Returns whether a kernel that has begun to record has not ended."""
        return any(_is_running(self._segment.track_headers(entry)) for entry in self._segment.launches())

    def is_any_to_start(self, descriptors: Collection[int]) -> bool:
        """Returns whether a kernel that got one of these descriptors has not begun to record."""
        addresses = [(descriptor & ~_ONLY_TELLS) // fmt.ALIGNMENT * fmt.ALIGNMENT for descriptor in descriptors]
        regions = {address - self._segment.address for address in addresses}
        entries = self._segment.launches()
        offsets = entries["headers_offset"].astype(np.int64) - fmt.LAUNCH_DESCRIPTOR.itemsize
        asked = entries[np.isin(offsets, list(regions))]
        return any(not _has_begun(entry, self._segment.track_headers(entry)) for entry in asked)

    def unknown_names(self) -> list[str]:
        """Returns the selected events and roles that no kernel has."""
        return self._selection.unknown_names(list(self._tables.values()))

    def _table(self, kernel: Kernel) -> KernelTable:
        key = (str(kernel.events), tuple(kernel.roles))
        if key not in self._tables:
            try:
                self._tables[key] = KernelTable.parse(*key)
            except BadInput as error:
                raise BadInput(f"launch {kernel.name!r}: {error}") from None
        return self._tables[key]


def _has_begun(entry: Any, headers: npt.NDArray[Any]) -> bool:
    return bool(((headers["started"] != 0) & is_of_launch(entry, headers)).any())


def _is_running(headers: npt.NDArray[Any]) -> bool:
    return bool(((headers["started"] != 0) & (headers["end_ticks"] == 0)).any())


def check_epoch(name: str, epoch: int) -> None:
    """Raises BadInput for an epoch that does not fit 32 bits."""
    if not isinstance(epoch, _WHOLE) or epoch < 0 or epoch >> 32:
        raise BadInput(f"launch {name!r}: epoch={epoch!r}; wanted a whole number from 0 to 2^32 - 1")


def check_key(name: str, key: str) -> None:
    """Raises BadInput for a key that a dump cannot hold."""
    if not is_text(key):
        raise BadInput(f"launch {name!r}: key={key!r}; wanted text")


def check_name(name: str) -> None:
    """Raises BadInput for a launch name that a dump cannot hold in full."""
    if not is_text(name) or not 1 <= len(name.encode()) <= fmt.NAME_BYTES:
        raise BadInput(f"launch {name!r}: wanted a name of at most {fmt.NAME_BYTES} bytes")


def _check(kernel: Kernel) -> None:
    check_name(kernel.name)
    for what, low, bits in (("grid", 1, 31), ("warps", 1, 16), ("stream", 0, 63)):
        value = getattr(kernel, what)
        if not isinstance(value, Integral) or value < low or value >> bits:
            told = f"launch {kernel.name!r}: {what}={value!r}"
            raise BadInput(f"{told}; wanted a whole number from {low} to 2^{bits} - 1")
    _check_roles(kernel.name, kernel.roles)


def _check_roles(name: str, roles: Sequence[str]) -> None:
    if isinstance(roles, str) or not all(isinstance(role, str) for role in roles):
        raise BadInput(f"launch {name!r}: roles={roles!r}; wanted a list of names")
