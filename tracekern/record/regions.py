"""Regions of launches: reserved ahead or by the launch itself, laid ready for replays of a graph, used again by a ring.

A launch that reserves its own takes a microsecond or two longer, whatever the number of its tracks. A flight recorder
without room for one more region takes the oldest launch's. Nothing is cleared: a track's header holds the generation of
the launch that stored it, a record its time, and readers skip what does not belong to the region's current launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.segment.launch_plan import LaunchPlan, Region

if TYPE_CHECKING:
    from tracekern._core import UsedRegions
    from tracekern.comm.devices.device import CaptureDevice
    from tracekern.segment.writer import SegmentWriter


_MAX_SHARE_OF_ROOM = 16
"""A batch takes at most one part in this many of the room left, because other kernels need room, too."""


def batch_size(wanted: int, segment: SegmentWriter, plans: Sequence[LaunchPlan]) -> int:
    """Returns how many regions of each plan to reserve now."""
    num_bytes = sum(plan.region_bytes for plan in plans)
    return max(1, min(wanted, segment.arena_room // (_MAX_SHARE_OF_ROOM * max(num_bytes, 1))))


class RegionQueue:
    """Regions for launches of one plan."""

    def __init__(
        self, segment: SegmentWriter, device: CaptureDevice, plan: LaunchPlan, used: UsedRegions | None = None
    ) -> None:
        """used: for a flight recorder: the used regions, the oldest of which is taken when no room is left."""
        self.used = used
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

    def take(self, sequence: int, epoch: int, key: str = "") -> int:
        """Returns LaunchHandle.descriptor of the next launch; without room counts the launch and returns 0."""
        segment, rows, told = self._segment, self.rows, (sequence & 0xFFFFFFFF, epoch & 0xFFFFFFFF, key)
        if rows is not None and rows.num_ready:
            return self._hand_out(*segment.host.start_ready(rows, *told))
        if rows is not None and rows.may_grow:
            region = segment.start_new(rows, sequence, epoch, key)
            if region is not None:
                return self._hand_out(region.launch_idx, region.offset)
            rows.may_grow = False  # room never comes back
        oldest = self.used.take_oldest() if self.used is not None else None
        if oldest is None:
            segment.refuse(1, self._plan.region_bytes)
            return 0
        segment.host.start_again(*oldest, *told)
        return self._hand_out(*oldest)

    def _hand_out(self, launch_idx: int, offset: int) -> int:
        if self.used is not None:
            self.used.append(launch_idx, offset)
        return self.choice_base + offset

    def reserve(self, wanted: int) -> None:
        """Reserves regions until `wanted` are ready, or no room is left."""
        while self.rows is not None and (missing := wanted - self.rows.num_ready) > 0:
            regions = self._segment.reserve_regions(self._plan, missing, self._mirror_offset)
            if not regions:
                break
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
