"""A flight recorder's regions, used again: where there is no room for one more, the oldest launch makes room.

Nothing is cleared: a track's header tells the generation of the launch that stored it, a record its time, and what does
not belong to the launch that has the region now is not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracekern.record.launch_plan import Region

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
