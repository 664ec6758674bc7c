"""Regions of launches: reserved ahead or by the launch itself, laid ready for replays of a graph, used again by a ring.

A launch that reserves its own takes a microsecond or two longer, whatever the number of its tracks. A flight recorder
without room for one more region takes the oldest launch's. Nothing is cleared: a track's header holds the generation of
the launch that stored it, a record its time, and readers skip what does not belong to the region's current launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.segment.launch_plan import LaunchPlan, Region

if TYPE_CHECKING:
    from tracekern.comm.devices.device import CaptureDevice
    from tracekern.segment.writer import SegmentWriter


Passed = Callable[[], bool]


class StreamProgress:
    """Progress of a stream, in launches of any kernel. It is read from marks between launches; each mark costs time."""

    def __init__(self, mark: Callable[[], Passed]) -> None:
        """mark: puts a mark behind all launches so far; returns a function that checks whether the stream passed it."""
        self._mark = mark
        self._marks: deque[tuple[int, Passed]] = deque()
        self._launches = 0
        self._last_mark = 0
        self._passed = 0
        self._spacing = 1 << 30
        self._may_mark = True

    def before_launch(self, ahead: bool) -> None:
        """Makes a mark that is due, before a launch that may or may not be recorded.

        ahead: earlier launches have not all been started, so a mark made now would come before them.
        """
        self._may_mark = not ahead
        self._mark_after(self._spacing)

    def limit_spacing(self, spacing: int) -> None:
        """Limits the launches between two marks to `spacing` from now on, not counting those of one burst."""
        if spacing < self._spacing:
            self._spacing = spacing

    def count(self, spacing: int) -> int:
        """Returns the number of the next launch. spacing: how far apart the marks for its kernel may be."""
        self._mark_after(spacing)
        self._launches += 1
        return self._launches - 1

    def is_through(self, launch: int) -> bool:
        """Returns whether the launch with this number has certainly finished."""
        if launch >= self._last_mark:
            self._mark_after(1)
        while launch >= self._passed and self._marks and self._marks[0][1]():
            self._passed = self._marks.popleft()[0]
        return launch < self._passed

    def _mark_after(self, num_launches: int) -> None:
        """Makes a mark if `num_launches` launches came since the last one and a mark is possible here."""
        if self._may_mark and self._launches - self._last_mark >= num_launches:
            self._marks.append((self._launches, self._mark()))
            self._last_mark = self._launches


class UsedRegions:
    """The regions of one kernel's launches on one stream, in the order of the launches."""

    def __init__(self, progress: StreamProgress) -> None:
        self._progress = progress
        self._regions: deque[tuple[int, Region]] = deque()

    def append(self, region: Region) -> None:
        """Adds a region that a launch is about to use."""
        self._regions.append((self._progress.count(len(self._regions) // 2 + 1), region))

    def take_oldest(self) -> Region | None:
        """Returns the oldest region; None if there is none, or if its launch may still run.

        Half the regions lie between two marks, which leaves the stream time to pass one.
        """
        regions = self._regions
        if not regions:
            return None
        self._progress.limit_spacing(len(regions) // 2 + 1)
        return regions.popleft()[1] if self._progress.is_through(regions[0][0]) else None


_MAX_SHARE_OF_ROOM = 16
"""A batch takes at most one part in this many of the room left, because other kernels need room, too."""


def batch_size(wanted: int, segment: SegmentWriter, plans: Sequence[LaunchPlan]) -> int:
    """Returns how many regions of each plan to reserve now."""
    num_bytes = sum(plan.region_bytes for plan in plans)
    return max(1, min(wanted, segment.arena_room // (_MAX_SHARE_OF_ROOM * max(num_bytes, 1))))


class RegionQueue:
    """Regions for launches of one plan."""

    def __init__(
        self, segment: SegmentWriter, device: CaptureDevice, plan: LaunchPlan, recycled: UsedRegions | None = None
    ) -> None:
        """recycled: for a flight recorder: the used regions, the oldest of which is taken when no room is left."""
        self._used = recycled
        self._segment = segment
        self._plan = plan
        self.choice_base = segment.address + plan.choice
        """What is added to a region's offset for LaunchHandle.descriptor."""
        mirror = device.memory.mirror if plan.flags & fmt.ENTRY_MIRRORED else None
        self._mirror_offset = mirror.offset() if mirror is not None else 0
        self.rows = segment.rows_of(plan, self._mirror_offset)
        """RegionPlan, with the regions that are reserved; None where there is no room for one."""
        self.counter = 0
        """Which counter of the LaunchTable its launches have."""
        self._has_room = self.rows is not None
        self._ready: deque[Region] = deque()
        """Reserved ones of a flight recorder."""

    def take(self, sequence: int, epoch: int, key: str = "") -> int:
        """Returns LaunchHandle.descriptor of the next launch; without room counts the launch and returns 0."""
        segment, region = self._segment, None
        if self._used is None and self.rows is not None and self.rows.num_ready:
            offset: int = segment.host.start_ready(self.rows, sequence & 0xFFFFFFFF, epoch & 0xFFFFFFFF, key)
            return self.choice_base + offset
        if self._ready:
            region = self._ready.popleft()
        elif self._has_room:
            region = segment.start_new(self.rows, sequence, epoch, key)
            if region is not None:
                return self._hand_out(region)
            self._has_room = False  # room never comes back
        if region is None and self._used is not None:
            region = self._used.take_oldest()
        if region is None:
            segment.refuse(1, self._plan.region_bytes)
            return 0
        segment.start_launch(region, sequence, epoch, key)
        return self._hand_out(region)

    def _hand_out(self, region: Region) -> int:
        if self._used is not None:
            self._used.append(region)
        return self.choice_base + region.offset

    def reserve(self, wanted: int) -> None:
        """Reserves regions until `wanted` are ready, or no room is left."""
        while self.rows is not None and (missing := wanted - self.rows.num_ready - len(self._ready)) > 0:
            regions = self._segment.reserve_regions(self._plan, missing, self._mirror_offset)
            if not regions:
                break
            if self._used is not None:
                self._ready.extend(regions)
                continue
            for region in regions:
                self.rows.add_ready(region.launch_idx, region.offset)


class Ring(Protocol):
    """Calls of a GraphRing (csrc/trace/graph_gpu.hpp)."""

    def place(self, regions: int) -> bool:
        """Makes the set at this address ready for a replay. Returns False if no slot is free."""
        ...

    @property
    def num_used(self) -> int:
        """Returns the number of sets that replays have taken; all those replays but the last have finished."""
        ...


class _RegionSet(NamedTuple):
    regions: tuple[Region, ...]
    """One for each launch of the graph."""
    where: npt.NDArray[Any]
    """[num_launches] REGION, with the generation above fmt.ADDRESS_BITS."""


class RegionSets:
    """Region sets of one graph, one for each replay."""

    def __init__(
        self,
        segment: SegmentWriter,
        ring: Ring,
        plans: Sequence[LaunchPlan],
        mirror_offset: int,
        max_ahead: int,
        recycles: bool,
    ) -> None:
        """plans: one for each launch of the graph. max_ahead: most sets reserved at once. recycles: for a flight
        recorder: without room left, the oldest replay's regions are used again.
        """
        self.set_bytes = sum(plan.region_bytes for plan in plans)
        self.fewest = 2 if recycles else 1
        """Sets that need room at least. A single set could never be used again, as it may still be written to."""
        self.without_slot = self.without_room = 0  # replays that ran unrecorded
        self._segment, self._ring, self._plans = segment, ring, plans
        self._mirror_offset, self._max_ahead, self._recycles = mirror_offset, max_ahead, recycles
        self._spare: list[list[Region]] = [[] for _ in plans]
        """Regions of each plan that make up no set yet, because another plan found less room."""
        self._free: deque[_RegionSet] = deque()
        self._laid: deque[_RegionSet] = deque()
        """All sets that are not free, the oldest first; used only if regions are recycled."""
        self._num_laid = 0
        self._next_batch = 8
        self._is_ahead = False

    def lay_ready(self) -> bool:
        """Makes one more set ready for the replay that starts now.

        One set is always ready early: the GPU fetches it during the replay before. Without room, or with all slots
        taken, the replay runs unrecorded. Returns False if all later replays do, too.
        """
        self._is_ahead = self._is_ahead or self._lay_set()
        if self._lay_set():
            return True
        if self._is_ahead:
            self._is_ahead = False
            return True
        if self._free:
            self.without_slot += 1
            return True
        has_room = self._segment.arena_room >= self.set_bytes
        self.without_room += not has_room
        return has_room or len(self._laid) >= self.fewest

    def _lay_set(self) -> bool:
        if not self._free:
            self._reserve()
        if not self._free and self._recycles:
            self._reuse()
        if not self._free or not self._ring.place(self._free[0].where.ctypes.data):
            return False
        laid = self._free.popleft()
        self._num_laid += 1
        if self._recycles:
            self._laid.append(laid)
        return True

    def _reserve(self) -> None:
        segment = self._segment
        if segment.arena_room < self.set_bytes:
            return
        count = batch_size(self._next_batch, segment, self._plans)
        for plan, spare in zip(self._plans, self._spare, strict=True):
            spare.extend(segment.reserve_regions(plan, count - len(spare), self._mirror_offset))
        whole = min(map(len, self._spare))
        sets = list(zip(*(spare[:whole] for spare in self._spare), strict=True))
        self._spare = [spare[whole:] for spare in self._spare]
        where = np.array([[(region.headers, region.records) for region in regions] for regions in sets], fmt.REGION)
        self._free.extend(map(_RegionSet, sets, where))
        self._next_batch = min(2 * self._next_batch, self._max_ahead)

    def _reuse(self) -> None:
        """Frees the oldest set if more than half of the sets hold replays that began.

        The oldest replay has finished then. If the GPU hangs and the host runs far ahead, the records that led to the
        hang are kept.
        """
        num_to_come = self._num_laid - self._ring.num_used
        if num_to_come >= len(self._laid) // 2:
            return
        regions, where = self._laid.popleft()
        renew = self._segment.renew_region
        where["headers"] = [renew(region) << fmt.ADDRESS_BITS | region.headers for region in regions]
        self._free.append(_RegionSet(regions, where))
