"""Ranges of the numbers in a dump's payload.

A number beyond them is damage. The reader refuses it: later stages add and subtract such numbers, and would end in an
overflow or a wrong picture far from the place that can be named here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump.format import MAX_NS, SampleKind
from tracekern.errors import BadInput

MIN_TICKS_PER_SECOND = 1_000
MAX_TICKS_PER_SECOND = 10**12
"""Clocks of devices tick 10^6 to 10^10 times a second."""

_Rows = npt.NDArray[Any]


def latest_ticks(ticks_per_second: int) -> int:
    """Returns the largest sound time of a clock: neither its ticks nor their ns exceed MAX_NS."""
    return min(MAX_NS, MAX_NS * ticks_per_second // 10**9)


def check_clock_samples(where: str, rows: _Rows, max_ticks: int) -> None:
    """Refuses samples at impossible times. where: the dump. max_ticks: of its rank's clock.

    The ticks of other ranks' clocks are in their samples, too, so these are held to MAX_NS only.
    """
    is_bracket = rows["kind"] == SampleKind.HOST_BRACKET
    for name in ("t0", "t1", "t2", "t3"):
        limit = np.where(is_bracket, max_ticks if name in ("t1", "t2") else MAX_NS, MAX_NS)
        _check(where, rows, "clock sample", name, limit)


def check_host_spans(where: str, rows: _Rows) -> None:
    """Refuses host spans at impossible times. An end before the start is none: the wall clock may have been set."""
    for name in ("start_ns", "end_ns"):
        _check(where, rows, "host span", name, np.full(len(rows), MAX_NS))


def check_track_headers(where: str, headers: _Rows, max_ticks: int) -> None:
    """Refuses tracks that began or ended at impossible times."""
    for name in ("start_ticks", "end_ticks"):
        if len(headers) and int(headers[name].max()) > max_ticks:
            row = headers[int(np.argmax(headers[name]))]
            track = f"track of launch {row['launch_idx']} block {row['block']} warp {row['warp']}"
            raise _impossible(where, track, name, int(row[name]), max_ticks)


def _check(where: str, rows: _Rows, thing: str, name: str, limit: npt.NDArray[np.int64]) -> None:
    wrong = np.flatnonzero((rows[name] < 0) | (rows[name] > limit))
    if len(wrong):
        first = int(wrong[0])
        raise _impossible(where, f"{thing} {first}", name, int(rows[name][first]), int(limit[first]))


def _impossible(where: str, thing: str, name: str, got: int, limit: int) -> BadInput:
    return BadInput(f"{where}: {thing}: {name} is {got}, wanted 0..{limit}; damaged: copy it again, or record again")
