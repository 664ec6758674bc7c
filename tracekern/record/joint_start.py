"""At which launch all ranks open a capture that start() has asked for on each of them, at another moment on each.

No rank waits for another one: each looks into the store of torch.distributed as it launches. It tells how far it is,
and the last one to tell names a launch as the target: the next one of all ranks at first, one further ahead in later
rounds. Each rank says whether it has seen the target in time. The first to come there, or to find that it has passed,
gives the verdict for all, since the store takes one: `go`, or `again` for another round.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

from tracekern.comm.ranks.meeting import id_of

_GO, _AGAIN = "go", "again"
_LOOK_S, _MOST_LOOK_S, _GROWTH = 0.005, 0.2, 1.5
"""Time between two looks, which take the store some 0.1 ms; longer and longer while ranks have not called start()."""
_ROUNDS_FOR_KEYS = 6
"""Rounds in which the keys may tell how the ranks count; then they go by the counts as they are."""
_LEVELS, _KEPT_OF_LEVEL = 12, 4


class JointStart:
    """This rank's part, from its call of start() on. What the store cannot do raises RuntimeError, as torch does."""

    def __init__(self, rank: int, ranks: Sequence[int], window: int, number: int, key: str) -> None:
        """ranks: of the world, which open the capture; rank is this one. window: how many captures they have opened so
        before. number, key: of this rank's last launch."""
        from torch.distributed import distributed_c10d

        self.who = id_of(ranks)
        prefix = f"tracekern-start-{self.who}-{window}"
        self._store: Any = distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
        self._rank, self._num_ranks = ranks.index(rank), len(ranks)
        self._launches = _Launches()
        self._launches.add(number, key)
        self._began, self._began_s = number, time.monotonic()
        self._look_s, self._next_look_s = _LOOK_S, 0.0
        self._round = 0
        self._has_told, self._target = False, -1
        self._look(number + 1)

    def is_due(self, number: int, key: str) -> bool:
        """Returns whether all ranks open the capture at this launch of theirs. number: counted from the first one."""
        self._launches.add(number, key)
        if self._target < 0 and time.monotonic() >= self._next_look_s:
            self._look(number)
            self._next_look_s = time.monotonic() + self._look_s
        if not 0 <= self._target <= number:
            return False
        if self._judge():
            return True
        self._round += 1
        self._has_told, self._target = False, -1
        self._look(number)
        return False

    def withdraw(self) -> None:
        """Takes the call of start() back."""
        if self._target >= 0:
            self._store.compare_set(self._of_round("verdict"), "", _AGAIN)
        self._store.add(self._of_round("told"), -1)

    def why_not_yet(self) -> str:
        """Returns why no capture has opened."""
        missing = self._num_ranks - self._store.add(self._of_round("told"), 0)
        if self._round or not missing:
            return "it had yet to begin, a few launches later"
        return f"{missing} of {self._num_ranks} ranks have not called tracekern.start()"

    def _look(self, number: int) -> None:
        """Tells how far this rank is, names the target as the last to tell, or sees it."""
        if not self._has_told:
            self._has_told, self._look_s = True, _LOOK_S
            per_s = (number - self._began) / max(time.monotonic() - self._began_s, _LOOK_S)
            about = {"number": number, "per_s": per_s, "launches": self._launches.kept()}
            self._store.set(self._of_round(f"about.{self._rank}"), json.dumps(about))
            if self._store.add(self._of_round("told"), 1) == self._num_ranks:
                self._name_target()
        if not self._store.check([self._of_round("target")]):
            self._look_s = min(self._look_s * _GROWTH, _MOST_LOOK_S)
            return
        self._target = int(json.loads(self._store.get(self._of_round("target")))[self._rank])
        if number <= self._target:
            self._store.add(self._of_round("in_time"), 1)

    def _name_target(self) -> None:
        names = [self._of_round(f"about.{rank}") for rank in range(self._num_ranks)]
        abouts = [json.loads(text) for text in self._store.multi_get(names)]
        launches = [dict(about["launches"]) for about in abouts]
        found = [_count_higher(launches[0], of_rank) for of_rank in launches]
        higher = [by or 0 for by in found]
        furthest = max(about["number"] - by for about, by in zip(abouts, higher, strict=True))
        per_s = max(about["per_s"] for about in abouts)
        ahead = max(1, math.ceil(3 * _LOOK_S * per_s)) << self._round - 1 if self._round else 0
        is_sure = None not in found or self._round >= _ROUNDS_FOR_KEYS
        targets = [furthest + ahead + by if is_sure else 0 for by in higher]  # 0 has passed
        self._store.set(self._of_round("target"), json.dumps(targets))

    def _judge(self) -> bool:
        """Returns whether the verdict is to open now."""
        is_seen = self._store.add(self._of_round("in_time"), 0) == self._num_ranks
        verdict: bytes = self._store.compare_set(self._of_round("verdict"), "", _GO if is_seen else _AGAIN)
        return verdict == _GO.encode()

    def _of_round(self, name: str) -> str:
        return f"{name}.{self._round}"


class _Launches:
    """Numbers and keys of the last launches, and of fewer and fewer of those before.

    Ranks keep the same ones: half of each level's go to the next, by a launch's number and by the checksum of its key.
    """

    def __init__(self) -> None:
        self._levels: list[deque[tuple[int, str]]] = [deque(maxlen=_KEPT_OF_LEVEL) for _ in range(2 * _LEVELS)]

    def add(self, number: int, key: str) -> None:
        for first, bits in ((0, number), (_LEVELS, zlib.crc32(key.encode()))):
            level = (bits & -bits).bit_length() - 1 if bits else _LEVELS
            self._levels[first + min(level, _LEVELS - 1)].append((number, key))

    def kept(self) -> list[tuple[int, str]]:
        return sorted({launch for level in self._levels for launch in level})


def _count_higher(ours: dict[int, str], theirs: dict[int, str]) -> int | None:
    """Returns by how much a peer counts the same launch higher: ranks may launch other things before their first step.

    0 where a launch of one number has one key on both, or none has a key. Else the least that one key on both tells.
    None: they tell nothing yet.
    """
    shared = ours.keys() & theirs.keys()
    if any(ours[number] == theirs[number] for number in shared) or not any((*ours.values(), *theirs.values())):
        return 0
    numbers_of: dict[str, list[int]] = {}
    for number, key in ours.items() if shared else ():
        numbers_of.setdefault(key, []).append(number)
    found = [number - own for number, key in theirs.items() if key for own in numbers_of.get(key, ())]
    return min(found, key=abs, default=None)
