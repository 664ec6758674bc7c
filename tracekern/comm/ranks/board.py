"""Pages that all ranks of a host read: meetings of the ranks with a time limit, and what a rank last refused.

A page is written by its rank alone. Nothing orders what others see of it: a record counts once its checksum is right.
"""

from __future__ import annotations

import struct
import time
import zlib
from typing import Any

import numpy as np

from tracekern.comm.heap import SymmetricHeap
from tracekern.comm.ranks import messages
from tracekern.comm.ranks.agreement import refuse_different_calls
from tracekern.comm.ranks.group import Group
from tracekern.errors import CommTimeout
from tracekern.formatting import duration, ranks

_RECORD_BYTES = 4096
_HEADER = struct.Struct("<QII")
"""Number, length and checksum of a record."""
_NUM_CALLS, _EVEN_TURN, _ODD_TURN, _CALL, _NOTE = range(5)
"""Places on a page: a word, then records."""
_POLLS_AWAKE = 200
_POLL_S = 0.0005


class PassedBy(Exception):  # noqa: N818 - not an error by itself
    """A rank has begun the call that this rank wanted to meet it for: `call`, in its words."""

    def __init__(self, rank: int, call: str) -> None:
        super().__init__(rank, call)
        self.rank, self.call = rank, call


class Board:
    """This rank's page and those of its peers. Made by all ranks together."""

    def __init__(self, group: Group) -> None:
        self._rank, self._names = group.rank, group.world_ranks
        heap = SymmetricHeap(group, _RECORD_BYTES * 5)
        self._pages = [heap.maps[rank] for rank in range(group.num_ranks)]
        self._own = heap.maps[group.rank]
        self._counts = [page[:8].view(np.uint64) for page in self._pages]
        self.clear()

    def clear(self) -> None:
        """Forgets all. Called by all ranks together, with a barrier behind it."""
        self._own[:] = 0
        self._turn = 1
        self._call = ""
        self._has_note = False

    # ---- calls, counted alike on all ranks ----

    @property
    def num_calls(self) -> int:
        """How many calls this rank has begun."""
        return int(self._counts[self._rank][0])

    def begin_call(self, number: int, call: str) -> None:
        """Tells that this rank begins the call `number`, and does not meet others for it. call: which one it is."""
        if call != self._call:
            self._call = call
            self._put(_CALL, number, call)
        self._counts[self._rank][0] = number + 1

    def take_back_call(self, number: int) -> None:
        """Tells that the call was refused before anything of it began."""
        self._counts[self._rank][0] = number

    # ---- what a rank refused ----

    def note(self, text: str, *, is_over: bool = False, is_late: bool = False) -> None:
        """Leaves word of why this rank does not come. is_over: nor to any meeting until all ranks have called reset().

        is_late: because another rank did not come.
        """
        self._has_note = True
        self._put(_NOTE, 0, [text, is_over, is_late])

    def clear_note(self) -> None:
        """Takes the word back: this rank has come."""
        if self._has_note:
            self._has_note = False
            self._withdraw(_NOTE)

    def why_late(self) -> str:
        """Returns "; " and what peers last refused, to end the text of an error with; "" if they refused nothing."""
        notes = [(peer, self._get(peer, _NOTE)) for peer in range(len(self._pages)) if peer != self._rank]
        told = [f"rank {self._names[peer]} {note[1][0]}" for peer, note in notes if note and not note[1][2]]
        return "".join(f"; {text}" for text in told[:2])

    # ---- meetings ----

    def meet(self, what: str, value: Any, timeout_s: float) -> list[Any]:
        """Returns the values of all ranks, [num_ranks], or on no rank.

        what: the call that ranks meet in. value: what JSON holds.

        Raises BadInput if ranks are in different calls, PassedBy, and CommTimeout for ranks that do not come.
        """
        place = (_EVEN_TURN, _ODD_TURN)[self._turn % 2]
        self._put(place, self._turn, [what, value])
        try:
            said = self._wait_for_all(place, what, timeout_s)
        except BaseException:
            self._withdraw(place)
            raise
        self._turn += 1
        refuse_different_calls([name for name, _ in said], self._names)
        return [their_value for _, their_value in said]

    def _wait_for_all(self, place: int, what: str, timeout_s: float) -> list[Any]:
        started, polls, passed = time.monotonic(), 0, PassedBy(-1, "")
        while True:
            records = [self._get(peer, place) for peer in range(len(self._pages))]
            absent = [peer for peer, record in enumerate(records) if record is None or record[0] != self._turn]
            if not absent:
                return [record[1] for record in records if record]
            last, passed = passed, self._find_passed(absent)
            if passed.rank >= 0 and last.rank >= 0:  # seen twice: what it said before may arrive later
                raise passed
            self._refuse_to_wait(what, absent, time.monotonic() - started, timeout_s)
            polls += 1
            time.sleep(0 if polls < _POLLS_AWAKE else _POLL_S)

    def _find_passed(self, absent: list[int]) -> PassedBy:
        own = self.num_calls
        for peer in absent:
            if int(self._counts[peer][0]) > own:
                record = self._get(peer, _CALL)
                return PassedBy(self._names[peer], str(record[1]) if record else "another call")
        return PassedBy(-1, "")

    def _refuse_to_wait(self, what: str, absent: list[int], waited_s: float, timeout_s: float) -> None:
        who = f"rank {self._names[self._rank]} {what}"
        for peer in absent:
            note = self._get(peer, _NOTE)
            if note and note[1][1]:
                raise CommTimeout(f"{who} stopped waiting: rank {self._names[peer]} {note[1][0]}")
        if waited_s >= timeout_s:
            names = [self._names[peer] for peer in absent]
            waited = duration(int(waited_s * 1e9))
            raise CommTimeout(f"{who} gave up on {ranks(names)} after {waited} before the launch{self.why_late()}")

    # ---- records ----

    def _put(self, place: int, number: int, value: Any) -> None:
        payload = messages.encode(value)
        header = _HEADER.pack(number, len(payload), _checksum(number, payload))
        record = np.frombuffer(header + payload, np.uint8)
        self._own[place * _RECORD_BYTES :][: len(record)] = record

    def _withdraw(self, place: int) -> None:
        self._own[place * _RECORD_BYTES :][: _HEADER.size] = 0

    def _get(self, peer: int, place: int) -> tuple[int, Any] | None:
        """Returns number and value of a record; None if there is none."""
        record = self._pages[peer][place * _RECORD_BYTES :][:_RECORD_BYTES]
        number, length, checksum = _HEADER.unpack(record[: _HEADER.size].tobytes())
        if not 0 < length <= _RECORD_BYTES - _HEADER.size:
            return None
        payload = record[_HEADER.size :][:length].tobytes()
        return (number, messages.decode(payload)) if _checksum(number, payload) == checksum else None


def _checksum(number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(number.to_bytes(8, "little")))
