"""The launches of a capture: what of each is recorded, where its records go, and how often each name was launched."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.errors import BadInput
from tracekern.record.regions import RegionQueue, StreamProgress, UsedRegions
from tracekern.record.selection import KernelTable, Selection
from tracekern.record.setup import is_text
from tracekern.record.sinks import SinkChoice
from tracekern.segment.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from tracekern.comm.device import CaptureDevice
    from tracekern.segment.writer import SegmentWriter


_WHOLE = (int, Integral)
"""The first is what is asked for at each launch, and the check of the second alone takes several times as long."""


class Kernel(NamedTuple):
    """What launches have in common whose regions are alike, as capture.launch() was given it."""

    name: str
    grid: int
    warps: int
    stream: int
    events: str | dict[str, Any]
    roles: Sequence[str]

    def as_key(self) -> Kernel:
        """The same with events as text and roles as a tuple. Raises BadInput for roles that are no list."""
        _check_roles(self.name, self.roles)  # before they are a tuple, and a word a list of letters
        events = json.dumps(self.events) if isinstance(self.events, dict) else self.events
        return self._replace(events=events, roles=tuple(self.roles))


class Launches:
    """Of one capture; its caller holds a lock."""

    def __init__(self, segment: SegmentWriter, device: CaptureDevice, selection: Selection, sinks: SinkChoice) -> None:
        self._segment = segment
        self._device = device
        self._selection = selection
        self._sinks = sinks
        self._sequence: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._tables: dict[tuple[str, tuple[str, ...]], KernelTable] = {}
        self._queues: dict[Kernel, RegionQueue] = {}
        self._to_come: Counter[Kernel] = Counter()
        self._progress: dict[int, StreamProgress] = {}

    def count(self, kernel: Kernel) -> int:
        """Address of the descriptor of a launch that only counts."""
        plan = self.plan(kernel, counted_only=True)
        self._to_come[kernel.as_key()] += 1
        return RegionQueue(self._segment, self._device, plan).take(0, plan.epoch)

    def reserve_counted(self) -> None:
        """Regions for what was counted since the last time, as if it came once more: no launch waits for its own."""
        for kernel, count in self._to_come.items():
            self._queue(kernel).reserve(-(-count // self._selection.every))
        self._to_come.clear()

    def take(self, kernel: Kernel, epoch: int, ahead: bool) -> int:
        """Address of the descriptor of the next launch of this name; 0 where it is not recorded."""
        progress = self._progress_on(kernel.stream)
        if progress is not None:
            progress.before_launch(ahead)
        name = kernel.name
        sequence = self._sequence.get(name, 0)
        self._sequence[name] = sequence + 1
        if sequence % self._selection.every:
            return 0
        return self._queue_of(kernel).take(sequence, epoch)

    def _queue_of(self, kernel: Kernel) -> RegionQueue:
        """The way of most launches is short: what is a key was checked when it became one."""
        try:
            known = self._queues.get(kernel)
        except TypeError:  # a dict or a list is no key yet
            known = None
        return known or self._queue(kernel.as_key())

    def _queue(self, kernel: Kernel) -> RegionQueue:
        if kernel not in self._queues:
            progress = self._progress_on(kernel.stream)
            recycled = None if progress is None else UsedRegions(progress)
            self._queues[kernel] = RegionQueue(self._segment, self._device, self.plan(kernel), recycled)
        return self._queues[kernel]

    def _progress_on(self, stream: int) -> StreamProgress | None:
        """Of a flight recorder, which uses regions again."""
        if self._selection.keep != "last":
            return None
        if stream not in self._progress:
            self._progress[stream] = StreamProgress(lambda: self._device.streams.mark(stream))
        return self._progress[stream]

    def plan(self, kernel: Kernel, counted_only: bool = False) -> LaunchPlan:
        """How launches of this kernel are recorded. Raises BadInput for arguments that cannot be used."""
        _check(kernel)
        try:
            table = self._table(kernel.as_key())
        except BadInput as error:
            raise BadInput(f"launch {kernel.name!r}: {error}") from None
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
            flags=fmt.ENTRY_COUNTED_ONLY if counted_only else fmt.ENTRY_MIRRORED if mirrored else 0,
        )

    def read_counts(self, first_launch: int) -> dict[str, int]:
        """Takes in what the counted launches from this index on found; records of the fullest track by name.

        Raises BadInput for a kernel that still runs.
        """
        ticks_per_second = float(self._segment.metadata["clock"]["ticks_per_second"])
        needed_mirror = self._sinks.needs_mirror()
        for entry in self._segment.launches()[first_launch:]:
            name = entry["name"].decode(errors="replace")
            headers = self._segment.track_headers(entry)
            if _is_running(headers):
                raise BadInput(f"counting(): kernel {name!r} still runs; synchronise inside the block")
            self._counted[name] = max(self._counted.get(name, 0), int(headers["attempted"].max(initial=0)))
            self._sinks.count(name, headers, ticks_per_second)
        # Regions are of the size before; a ring's stay as they are unless its records go elsewhere from now on. Given
        # up, they would be in nobody's hands, and a full flight recorder has no others.
        if self._selection.keep == "first" or self._sinks.needs_mirror() != needed_mirror:
            self._queues.clear()
        return self._counted

    def is_any_running(self) -> bool:
        """Whether a kernel is still to end that has begun to record."""
        return any(_is_running(self._segment.track_headers(entry)) for entry in self._segment.launches())

    def unknown_names(self) -> list[str]:
        """Selected events and roles that no kernel has."""
        return self._selection.unknown_names(list(self._tables.values()))

    def _table(self, kernel: Kernel) -> KernelTable:
        key = (str(kernel.events), tuple(kernel.roles))
        if key not in self._tables:
            self._tables[key] = KernelTable.parse(*key)
        return self._tables[key]


def _is_running(headers: npt.NDArray[Any]) -> bool:
    return bool(((headers["started"] != 0) & (headers["end_ticks"] == 0)).any())


def check_epoch(name: str, epoch: int) -> None:
    """Raises BadInput for an epoch that no kernel's 32 bits hold."""
    if not isinstance(epoch, _WHOLE) or epoch < 0 or epoch >> 32:
        raise BadInput(f"launch {name!r}: epoch={epoch!r}; wanted a whole number from 0 to 2^32 - 1")


def check_name(name: str) -> None:
    """Raises BadInput for a name of a launch that no dump holds whole."""
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
