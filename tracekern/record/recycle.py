"""A flight recorder's regions, used again: where there is no room for one more, the oldest launch makes room.

Nothing is cleared but the headers. The records of the new launch tell themselves from the old ones by their lap, which
goes on from where the old ones ended, and by their time.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from tracekern.record import format as fmt
from tracekern.record.ring import ring_slots

if TYPE_CHECKING:
    from tracekern.record.launch_plan import Region
    from tracekern.record.segment import Segment

_MAX_FIRST_LAP = 1 << 15
"""Laps count 16 bits. Beyond this the records are cleared once and laps start anew."""


class UsedRegions:
    """The regions of one kernel's launches on one stream, in the order of the launches."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._regions: deque[Region] = deque()

    def append(self, region: Region) -> None:
        """A launch is going to use it."""
        self._regions.append(region)

    def take_oldest(self) -> Region | None:
        """The oldest region, as if it were new; None while its launch may still run.

        A stream runs one kernel after the other: once a launch has begun, the one before it is through.
        """
        if len(self._regions) < 2 or not self._has_begun(self._regions[1]):
            return None
        region = self._regions.popleft()
        self._renew(region)
        return region

    def _has_begun(self, region: Region) -> bool:
        entry = self._segment.launches()[region.launch_idx]
        return bool(self._segment.track_headers(entry)["started"].any())

    def _renew(self, region: Region) -> None:
        entries = self._segment.launches()
        # First of all: whoever packs the segment from outside must not see half of it.
        entries["flags"][region.launch_idx] |= fmt.ENTRY_RESERVED
        entry = entries[region.launch_idx]
        headers = self._segment.track_headers(entry)
        is_ring = headers["started"] == fmt.STARTED_RING
        slots = ring_slots(int(entry["records_per_track"]))
        laps = -(-headers["attempted"][is_ring].astype(np.int64) // max(slots, 1))
        first_lap = int(laps.max(initial=int(entry["first_lap"])))
        if first_lap > _MAX_FIRST_LAP or ((headers["started"] != 0) & ~is_ring).any():
            self._segment.records(entry)[:] = 0
            first_lap = 0
        headers[:] = 0
        entries["first_lap"][region.launch_idx] = first_lap
        self._segment.descriptors(region.offset)["first_lap"] = first_lap
