"""Tells which rank this thread is: a resident one (tracekern.comm.ranks.resident), or the only rank of its process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from tracekern.comm.ranks.launcher_environment import rank_and_size


class ResidentRanks(Protocol):
    """The ranks of one process (tracekern.comm.ranks.resident.Residents)."""

    num_ranks: int

    def open_group(self, rank: int, members: Sequence[int] | None = None) -> Any:
        """Returns the rank's Group of some of the ranks, or of all."""


class _Thread(threading.local):
    resident: tuple[ResidentRanks, int] | None = None


_thread = _Thread()


@contextlib.contextmanager
def being(residents: ResidentRanks, rank: int) -> Iterator[None]:
    """Makes this thread a resident rank inside the block."""
    _thread.resident = (residents, rank)
    try:
        yield
    finally:
        _thread.resident = None


def this_resident() -> tuple[ResidentRanks, int] | None:
    """Returns the resident ranks and which of them this thread is; None for a thread that is none of them."""
    return _thread.resident


def rank_of_thread() -> int:
    """Returns the rank of this thread if it is a resident one, else the rank of the process, as its launcher tells."""
    own = this_resident()
    return own[1] if own is not None else rank_and_size()[0]
