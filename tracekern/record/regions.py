"""Regions of launches: reserved ahead in growing batches, laid ready for replays of a graph, used again by a ring.

A launch then costs its host microseconds. A flight recorder without room for one more region takes the oldest
launch's. Nothing is cleared: a track's header tells the generation of the launch that stored it, a record its time,
and what does not belong to the launch that has the region now is not read.
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
    from tracekern.comm.device import CaptureDevice
    from tracekern.segment.writer import SegmentWriter


Passed = Callable[[], bool]


class StreamProgress:
    """How far a stream has come, in launches of any kernel; told by marks between them, each of which costs time."""

    def __init__(self, mark: Callable[[], Passed]) -> None:
        """mark: makes a mark behind all launches so far; what it returns says whether the stream has passed it."""
        self._mark = mark
        self._marks: deque[tuple[int, Passed]] = deque()
        self._launches = 0
        self._last_mark = 0
        self._passed = 0
        self._spacing = 1 << 30
        self._may_mark = True

    def before_launch(self, ahead: bool) -> None:
        """A launch is asked for, which need not be recorded. A mark that is due comes before it.

        ahead: the launches before it were not all started yet, so a mark would stand in front of them.
        """
        self._may_mark = not ahead
        self._mark_after(self._spacing)

    def limit_spacing(self, spacing: int) -> None:
        """From now on at most so many launches lie between two marks, those of one burst aside."""
        self._spacing = min(self._spacing, spacing)

    def count(self, spacing: int) -> int:
        """The number of the launch that comes now. spacing: of the marks that its kernel needs."""
        self._mark_after(spacing)
        self._launches += 1
        return self._launches - 1

    def is_through(self, launch: int) -> bool:
        """Whether the launch of this number is certain to be through."""
        if launch >= self._last_mark:
            self._mark_after(1)
        while launch >= self._passed and self._marks and self._marks[0][1]():
            self._passed = self._marks.popleft()[0]
        return launch < self._passed

    def _mark_after(self, num_launches: int) -> None:
        """Makes a mark where so many launches came since the last, and one can stand here."""
        if self._may_mark and self._launches - self._last_mark >= num_launches:
            self._marks.append((self._launches, self._mark()))
            self._last_mark = self._launches


class UsedRegions:
    """The regions of one kernel's launches on one stream, in the order of the launches."""

    def __init__(self, progress: StreamProgress) -> None:
        self._progress = progress
        self._regions: deque[tuple[int, Region]] = deque()

    def append(self, region: Region) -> None:
        """A launch is going to use it."""
        self._regions.append((self._progress.count(self._spacing), region))

    def take_oldest(self) -> Region | None:
        """The oldest region; None where there is none, or its launch may still run."""
        if not self._regions:
            return None
        self._progress.limit_spacing(self._spacing)
        return self._regions.popleft()[1] if self._progress.is_through(self._regions[0][0]) else None

    @property
    def _spacing(self) -> int:
        """Half way round all regions there is a mark at the latest, and time to pass it."""
        return len(self._regions) // 2 + 1


_MAX_SHARE_OF_ROOM = 16
"""A batch takes at most one part in this many of what is left: other kernels need room, too."""


def batch_size(wanted: int, segment: SegmentWriter, plans: Sequence[LaunchPlan]) -> int:
    """How many regions of each plan to reserve now."""
    num_bytes = sum(plan.region_bytes for plan in plans)
    return max(1, min(wanted, segment.arena_room // (_MAX_SHARE_OF_ROOM * max(num_bytes, 1))))


class RegionQueue:
    """For launches of one plan."""

    def __init__(
        self, segment: SegmentWriter, device: CaptureDevice, plan: LaunchPlan, recycled: UsedRegions | None = None
    ) -> None:
        """recycled: where there is no room left, the oldest launch gives its region; of a flight recorder."""
        self._used = recycled
        self._segment = segment
        self._device = device
        self._plan = plan
        self._next_batch = 1
        self._ready: deque[Region] = deque()

    def take(self, sequence: int, epoch: int) -> int:
        """Address of the descriptor for the next launch; 0, and the launch is counted, where there is no room."""
        if not self._ready:
            self.reserve(self._next_batch)
        if not self._ready:
            self._reuse()
        if not self._ready:
            self._segment.refuse(self._plan)
            return 0
        region = self._ready.popleft()
        if self._used is not None:
            self._used.append(region)
        self._segment.start_launch(region, sequence, epoch)
        return self._segment.address + region.offset

    def _reuse(self) -> None:
        oldest = self._used.take_oldest() if self._used is not None else None
        if oldest is not None:
            self._ready.append(oldest)

    def reserve(self, wanted: int) -> None:
        """Up to so many regions more, or as many as may be reserved ahead."""
        if not self._next_batch:
            return
        count = batch_size(min(wanted, self._device.streams.max_regions_ahead), self._segment, [self._plan])
        mirror = self._device.memory.mirror if self._plan.flags & fmt.ENTRY_MIRRORED else None
        mirror_offset = mirror.offset() if mirror is not None else 0
        self._ready.extend(self._segment.reserve_regions(self._plan, count, mirror_offset))
        # Room never comes back: where there was none, nobody asks again.
        self._next_batch = min(2 * self._next_batch, self._device.streams.max_regions_ahead) if self._ready else 0


class Ring(Protocol):
    """What is asked of a GraphRing (csrc/trace/graph_gpu.hpp)."""

    def place(self, regions: int) -> bool:
        """Lays the set at this address ready; False where no slot is free."""
        ...

    @property
    def num_used(self) -> int:
        """Sets that replays got so far; the replays of all but the last of them are through."""
        ...


class _RegionSet(NamedTuple):
    regions: tuple[Region, ...]
    """One for each launch of the graph."""
    where: npt.NDArray[Any]
    """[num_launches] REGION, with the generation above fmt.ADDRESS_BITS."""


class RegionSets:
    """Of one graph."""

    def __init__(
        self,
        segment: SegmentWriter,
        ring: Ring,
        plans: Sequence[LaunchPlan],
        mirror_offset: int,
        max_ahead: int,
        recycles: bool,
    ) -> None:
        """plans: of the graph's launches. max_ahead: sets reserved at once. recycles: where there is no room left, the
        oldest replay gives its regions; of a flight recorder.
        """
        self.set_bytes = sum(plan.region_bytes for plan in plans)
        self.fewest = 2 if recycles else 1
        """Sets that there has to be room for: one alone is never used again, as it may still be written to."""
        self.without_slot = self.without_room = 0  # replays that ran unrecorded
        self._segment, self._ring, self._plans = segment, ring, plans
        self._mirror_offset, self._max_ahead, self._recycles = mirror_offset, max_ahead, recycles
        self._spare: list[list[Region]] = [[] for _ in plans]
        """Of each plan those that make no set: another plan found less room."""
        self._free: deque[_RegionSet] = deque()
        self._laid: deque[_RegionSet] = deque()
        """Where regions are recycled: all sets that are not free, the oldest first."""
        self._num_laid = 0
        self._next_batch = 8
        self._is_ahead = False

    def lay_ready(self) -> bool:
        """One set for the replay that starts now, behind one that is ready early: the GPU fetches it beside the replay
        before. Without room, or with all slots taken, it runs unrecorded. False: so do all that come after it.
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
        """Frees the oldest set, where more than half hold replays that began: its own is through then, and a host far
        ahead of a GPU that hangs leaves what led there.
        """
        num_to_come = self._num_laid - self._ring.num_used
        if num_to_come >= len(self._laid) // 2:
            return
        regions, where = self._laid.popleft()
        renew = self._segment.renew_region
        where["headers"] = [renew(region) << fmt.ADDRESS_BITS | region.headers for region in regions]
        self._free.append(_RegionSet(regions, where))
