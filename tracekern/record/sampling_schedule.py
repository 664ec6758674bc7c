"""Lets ranks agree on when all of them sample their clocks: before which launch, and whether at the end.

Sampling is collective and becomes due by elapsed time, which rank 0 measures for all. But if a rank waited for the
others before launch n, while one of them is still inside launch n - 1 and waits for that rank's data, both would hang.
So rank 0 decides for each launch, with words in the segments that all can see: it says "go" only once all others are
ready before the same launch. Ranks that are further than rank 0 wait until it arrives there. Ranks of one clock do not
meet while they sample, so rank 0 may be launches ahead when another reads its word: the last "go" stays in it.

Until sampling is due, a launch costs every rank the same, whatever the number of ranks. If rank 0 looked at each of the
others, it would fall microseconds behind them at every launch, and the trace would blame it. A rank that waited in vain
tries again only after a pause, which grows each time: one late rank must not make all others late as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tracekern.dump import format as fmt
from tracekern.segment.names import has_owner
from tracekern.segment.view import SegmentView

_LEADER_WAITS_S = 0.05
"""Rank 0's wait for the others. After a failure it doubles, up to a second, and follows a pause of twenty waits."""
_LEADER_WAITS_AT_MOST_S = 1.0
_LEADER_PAUSES = 20
_FOLLOWER_WAITS_S = 2.0
"""Time for rank 0 to come out of its kernel; after it the launch goes on without samples."""
_FOLLOWER_PAUSES_S = 4.0
"""Pause of a rank that waited in vain; doubles each time, up to a minute."""
_FOLLOWER_PAUSES_AT_MOST_S = 64.0
_LAST_WORD_S = 60.0
"""Time for rank 0 to say what it decides, once it counts who is ready: a second, unless its process stands still."""
_POLL_S = 0.0005
_LEAVING_POLL_S = 0.005
_LEAVES, _LEAVES_IN_DISORDER = 1, 2
_LAUNCH_BITS = 32


def _word_of(field: str) -> int:
    return int(fmt.SEGMENT_HEADER.fields[field][1]) // 8  # type: ignore[index]


_READY, _DECISION, _DUE = _word_of("ready_launch"), _word_of("decision"), _word_of("due_ns")
_LAUNCH, _LAST_GO = range(2)


class SamplingSchedule:
    """Schedule of one rank.

    segments: of all ranks on this host, by rank. rank: this one's place among them. Call postpone() before the first
    launch.
    """

    def __init__(self, rank: int, segments: Sequence[SegmentView]) -> None:
        self._rank = rank
        self._is_leader = rank == 0
        self._names = [segment.name for segment in segments]
        self._headers = [segment.header for segment in segments]
        words = [segment.words[: fmt.SEGMENT_HEADER.itemsize // 4].cast("B").cast("Q") for segment in segments]
        self._own, self._leader, self._others = words[rank], words[0], words[1:]
        self.counts: Any = memoryview(bytearray(16)).cast("Q")
        """Launches so far, and that of the last "go". csrc/apis/launches.cpp counts, too."""
        self.words = segments[0].address + 8 * _DUE, segments[0].address + 8 * _DECISION if self._is_leader else 0
        """Addresses of when sampling is due, and of what rank 0 decides before each launch; 0 on other ranks."""
        self._waits_s = _LEADER_WAITS_S
        self._tries_again_ns = 0
        self._pauses_s = _FOLLOWER_PAUSES_S

    @property
    def _launch(self) -> int:
        count: int = self.counts[_LAUNCH]
        return count

    def before_launch(self) -> bool:
        """Returns whether all ranks sample now; the answer is the same on each. Call it before every launch."""
        self.counts[_LAUNCH] += 1
        now = time.monotonic_ns()
        is_due = now >= self._leader[_DUE]
        if self._is_leader:
            if is_due:
                self._own[_READY] = self.counts[_LAUNCH]  # until it has decided
            go = is_due and self._lead()
            if go:
                self.counts[_LAST_GO] = self.counts[_LAUNCH]
                self.postpone(_LEADER_WAITS_AT_MOST_S)  # before others come to their next launch
            self._own[_DECISION] = self.counts[_LAST_GO] << _LAUNCH_BITS | self.counts[_LAUNCH]
            if is_due:
                self._own[_READY] = 0
            return go
        return is_due and now >= self._tries_again_ns and self._follow()

    def postpone(self, duration_s: float) -> None:
        """Makes sampling due after `duration_s`. Rank 0's value counts."""
        self._own[_DUE] = time.monotonic_ns() + int(duration_s * 1e9)

    def leave(self, in_order: bool, limit_s: float) -> bool:
        """Returns whether all ranks close their captures in order, so that they can sample clocks once more.

        A single rank that raised, lost its device, died, or did not come within `limit_s` makes it False for all.
        """
        own = self._headers[self._rank]
        own["leaving"] = _LEAVES if in_order else _LEAVES_IN_DISORDER
        all_ranks = self._headers
        _poll(
            lambda: (
                all(int(rank["leaving"]) == _LEAVES for rank in all_ranks)
                or any(int(rank["leaving"]) == _LEAVES_IN_DISORDER for rank in all_ranks)
                or any(self._is_dead(rank, header) for rank, header in enumerate(all_ranks))
            ),
            limit_s,
            _LEAVING_POLL_S,
        )
        in_order = all(int(rank["leaving"]) == _LEAVES for rank in all_ranks)
        if not in_order:
            own["leaving"] = _LEAVES_IN_DISORDER
        return in_order

    def _is_dead(self, rank: int, header: Any) -> bool:
        """Returns whether the process of a rank that has not closed is gone.

        The segment's lock shows it; the pid does not, because the parent may keep a zombie.
        """
        if int(header["leaving"]):
            return False
        try:
            return not has_owner(self._names[rank])
        except FileNotFoundError:  # its launcher has salvaged the segment
            return True

    def _lead(self) -> bool:
        """Returns whether all others reach this launch in time, and none has passed it already."""
        deadline = time.monotonic() + self._waits_s
        while True:
            ready = [words[_READY] for words in self._others]
            if all(launch == self._launch for launch in ready):
                return True
            if any(launch > self._launch for launch in ready):
                return False
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self.postpone(_LEADER_PAUSES * self._waits_s)
        self._waits_s = min(2 * self._waits_s, _LEADER_WAITS_AT_MOST_S)
        return False

    def _follow(self) -> bool:
        def is_decided() -> bool:
            return bool(self._leader[_DECISION] % (1 << _LAUNCH_BITS) >= self._launch)

        self._own[_READY] = self._launch
        if not _poll(is_decided, _FOLLOWER_WAITS_S):
            self._own[_READY] = 0
            # Rank 0 may have looked just before. If it counts who is ready now, what it decides is binding.
            _poll(lambda: self._leader[_READY] != self._launch or is_decided(), _LAST_WORD_S)
            self._tries_again_ns = time.monotonic_ns() + int(self._pauses_s * 1e9)
            self._pauses_s = min(2 * self._pauses_s, _FOLLOWER_PAUSES_AT_MOST_S)
        self._own[_READY] = 0
        go = bool(self._leader[_DECISION] >> _LAUNCH_BITS == self._launch)
        if go:
            self._pauses_s = _FOLLOWER_PAUSES_S
        return go


def _poll(condition: Callable[[], bool], limit_s: float, every_s: float = _POLL_S) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True
