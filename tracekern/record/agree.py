"""How ranks agree on when all of them sample their clocks: before which launch, and whether at the end.

Sampling is collective, and due by the time that has passed. But a rank that waits for the others before launch n, while
one of them is still inside launch n - 1 and waits for that rank's data, would hang both. So rank 0 decides for each
launch, with words in the segments that all can see: it says "go" only once all others stand ready before the same
launch, and never waits long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tracekern.record.segment import Segment
from tracekern.record.segment_names import has_owner

_LEADER_WAITS_S = 0.05
_FOLLOWER_WAITS_S = 2.0
"""For rank 0 to come out of its kernel; then the launch goes on without samples."""
_LAST_WORD_S = 0.1
_LEAVING_WAITS_S = 60.0
_POLL_S = 0.0005
_LEAVES, _LEAVES_IN_DISORDER = 1, 2


class SampleAgreement:
    """One per rank. segments: those of all ranks on this host, by rank; launches are numbered from 1."""

    def __init__(self, rank: int, segments: Sequence[Segment]) -> None:
        self._rank = rank
        self._is_leader = rank == 0
        self._names = [segment.name for segment in segments]
        self._own = segments[rank].header
        self._leader = segments[0].header
        self._others = [segment.header for segment in segments[1:]]

    def decide(self, launch_number: int, due: bool) -> bool:
        """Whether all ranks sample now, before launch `launch_number`; the same answer on each."""
        return self._lead(launch_number, due) if self._is_leader else self._follow(launch_number, due)

    def leave(self, in_order: bool) -> bool:
        """Whether all ranks close their captures in order, so that they can sample clocks together once more.

        One that raised, lost its device, died, or did not come within a minute decides for all.
        """
        self._own["leaving"] = _LEAVES if in_order else _LEAVES_IN_DISORDER
        if not in_order:
            return False
        everybody = [self._leader, *self._others]
        settled = _poll(
            lambda: (
                all(int(rank["leaving"]) == _LEAVES for rank in everybody)
                or any(int(rank["leaving"]) == _LEAVES_IN_DISORDER for rank in everybody)
                or any(self._is_dead(rank, header) for rank, header in enumerate(everybody))
            ),
            _LEAVING_WAITS_S,
        )
        in_order = settled and all(int(rank["leaving"]) == _LEAVES for rank in everybody)
        if not in_order:
            self._own["leaving"] = _LEAVES_IN_DISORDER
        return in_order

    def _is_dead(self, rank: int, header: Any) -> bool:
        """Of another rank that has not closed: is its process gone? Its lock is; its parent may keep a zombie."""
        if rank == self._rank or int(header["leaving"]):
            return False
        try:
            return not has_owner(self._names[rank]) and not int(header["leaving"])
        except FileNotFoundError:  # closed, or saved for it
            return not int(header["leaving"])

    def _lead(self, launch_number: int, due: bool) -> bool:
        ready = [int(other["ready_launch"]) == launch_number for other in self._others]
        go = (due or any(ready)) and _poll(self._all_ready(launch_number), _LEADER_WAITS_S)
        if go:
            self._own["go_launch"] = launch_number
        self._own["decided_launch"] = launch_number
        return go

    def _all_ready(self, launch_number: int) -> Callable[[], bool]:
        return lambda: all(int(other["ready_launch"]) == launch_number for other in self._others)

    def _follow(self, launch_number: int, due: bool) -> bool:
        if not due or int(self._leader["decided_launch"]) >= launch_number:
            return False
        self._own["ready_launch"] = launch_number
        if not _poll(lambda: int(self._leader["decided_launch"]) >= launch_number, _FOLLOWER_WAITS_S):
            self._own["ready_launch"] = 0
            # It may have looked just before, and be about to say so.
            _poll(lambda: int(self._leader["decided_launch"]) >= launch_number, _LAST_WORD_S)
        self._own["ready_launch"] = 0
        return int(self._leader["go_launch"]) == launch_number


def _poll(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
