"""Regions for the replays of a traced graph: one set a replay, laid ready in the ring that the GPU takes them from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tracekern.record import format as fmt
from tracekern.record.launch_plan import LaunchPlan, Region
from tracekern.record.region_queue import batch_size

if TYPE_CHECKING:
    from tracekern.record.segment import Segment


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
        segment: Segment,
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
