"""Regions of a kernel's launches, reserved ahead in growing batches: a launch then costs its host microseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracekern.record import format as fmt
from tracekern.record.launch_plan import LaunchPlan, Region
from tracekern.record.recycle import UsedRegions

if TYPE_CHECKING:
    from tracekern.record.device import CaptureDevice
    from tracekern.record.segment import Segment

_MAX_SHARE_OF_ROOM = 16
"""A batch takes at most one part in this many of what is left: other kernels need room, too."""


def batch_size(wanted: int, segment: Segment, plans: Sequence[LaunchPlan]) -> int:
    """How many regions of each plan to reserve now."""
    num_bytes = sum(plan.region_bytes for plan in plans)
    return max(1, min(wanted, segment.arena_room // (_MAX_SHARE_OF_ROOM * max(num_bytes, 1))))


class RegionQueue:
    """For launches of one plan."""

    def __init__(
        self, segment: Segment, device: CaptureDevice, plan: LaunchPlan, recycled: UsedRegions | None = None
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
        count = batch_size(min(wanted, self._device.max_regions_ahead), self._segment, [self._plan])
        mirror_offset = self._device.mirror_offset() if self._plan.flags & fmt.ENTRY_MIRRORED else 0
        self._ready.extend(self._segment.reserve_regions(self._plan, count, mirror_offset))
        # Room never comes back: where there was none, nobody asks again.
        self._next_batch = min(2 * self._next_batch, self._device.max_regions_ahead) if self._ready else 0
