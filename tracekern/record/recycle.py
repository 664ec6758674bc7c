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

    def limit_spacing(self, spacing: int) -> None:
        """From now on at most so many launches lie between two marks, those of one burst aside."""
        self._spacing = min(self._spacing, spacing)

    def count(self, spacing: int, ahead: bool) -> int:
        """The number of the launch that comes now, with a mark before it where that is due.

        spacing: of the marks that this launch's kernel needs. ahead: the launches before it were not all started yet,
        so a mark would stand in front of them.
        """
        if not ahead and self._launches - self._last_mark >= min(spacing, self._spacing):
            self._marks.append((self._launches, self._mark()))
            self._last_mark = self._launches
        self._launches += 1
        return self._launches - 1

    def is_through(self, launch: int) -> bool:
        """Whether the launch of this number is certain to be through."""
        while launch >= self._passed and self._marks and self._marks[0][1]():
            self._passed = self._marks.popleft()[0]
        return launch < self._passed


class UsedRegions:
    """The regions of one kernel's launches on one stream, in the order of the launches."""

    def __init__(self, progress: StreamProgress) -> None:
        self._progress = progress
        self._regions: deque[tuple[int, Region]] = deque()

    def append(self, region: Region, ahead: bool) -> None:
        """A launch is going to use it. ahead: see StreamProgress.count()."""
        self._regions.append((self._progress.count(self._spacing, ahead), region))

    def take_oldest(self) -> Region | None:
        """The oldest region; None while its launch may still run."""
        self._progress.limit_spacing(self._spacing)
        if not self._regions or not self._progress.is_through(self._regions[0][0]):
            return None
        return self._regions.popleft()[1]

    @property
    def _spacing(self) -> int:
        """Half way round all regions there is a mark at the latest, and time to pass it."""
        return len(self._regions) // 2 + 1
