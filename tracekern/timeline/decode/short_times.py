"""Times of span records made whole: 32 bits in units of 2^shift ticks, counted from the 64-bit start of their track.

A track that lasts less than 2^32 units (137 s with CUDA's 32 ns) leaves one answer, and a time beyond its end is
damage. In one that lasts longer, or may have, the begins of its records, which never fall, are unwrapped: of all
answers this is the shortest, and the track is reported as ambiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.dump.reader import Dump
from tracekern.formatting import count
from tracekern.timeline.model import OPEN_END, Int32, Int64, Problem

_WRAP = 1 << 32


@dataclass(frozen=True)
class ShortTimes:
    """[num_runs] columns."""

    start: Int64
    """Units from the clock's 0 to the start of the run."""
    length: Int64
    """Units from its start to its end, or to the moment when its dump was packed; no time of the run is later."""
    is_ambiguous: npt.NDArray[np.bool_]
    shift: int
    ticks_per_second: int

    @classmethod
    def of(cls, start: Int64, end: Int64, dump: Dump) -> ShortTimes:
        """start, end: ticks of all runs of the dump, ends 0 where a run never finished."""
        clock = dump.metadata["clock"]
        shift, per_second = int(clock["shift"]), int(clock["ticks_per_second"])
        stop = np.where(end > 0, end, np.maximum(_packed_ticks(dump), start))
        length = np.maximum((stop >> shift) - (start >> shift), 0)
        return cls(start >> shift, length, length >= _WRAP, shift, per_second)

    def of_records(self, records: npt.NDArray[Any], some: Int64, owner: Int32) -> tuple[Int64, Int64, Int32]:
        """Begins, ends and damage of [n] SPAN_RECORD; record i belongs to the run some[owner[i]], owners ascending.

        Returns [n] ticks of the begins, [n] ticks of the ends, OPEN_END where a span is open, and the owners, once
        each, whose times were impossible: raised to the time before, or cut at the end of the run.
        """
        start, length = self.start[some], self.length[some]
        low = (start & (_WRAP - 1)).astype(np.uint32)
        begin = (records["begin"] - low[owner]).astype(np.int64)
        duration = (records["end"] - records["begin"]).astype(np.int64)
        is_open = duration == _WRAP - 1
        limit = length[owner]
        if self.is_ambiguous[some].any():
            begin = self._unwrap(begin, some, owner)
        is_wrong = begin > limit
        begin[is_wrong] = 0
        falls = np.flatnonzero((begin[1:] < begin[:-1]) & (owner[1:] == owner[:-1]))
        for run in np.unique(owner[1:][falls]).tolist():
            rows = slice(*np.searchsorted(owner, [run, run + 1]).tolist())
            begin[rows] = np.maximum.accumulate(begin[rows])
        end = begin + duration
        is_late = (end > limit) & ~is_open
        end = np.minimum(end, limit)
        damaged = np.unique(np.concatenate([owner[is_wrong | is_late], owner[1:][falls]]))
        first = start[owner]
        return (
            (begin + first) << self.shift,
            np.where(is_open, OPEN_END, (end + first) << self.shift),
            damaged.astype(np.int32),
        )

    def _unwrap(self, begin: Int64, some: Int64, owner: Int32) -> Int64:
        """Adds 2^32 units wherever begins fall, in runs that are ambiguous."""
        wraps = np.zeros(len(begin), np.int64)
        wraps[1:] = (begin[1:] < begin[:-1]) & (owner[1:] == owner[:-1]) & self.is_ambiguous[some][owner[1:]]
        total = np.cumsum(wraps)
        before = np.searchsorted(owner, owner, side="left")  # of each record: the first of its run
        unwrapped: Int64 = begin + (total - total[before]) * _WRAP
        return unwrapped

    def describe(self, rank: int, is_span: npt.NDArray[np.bool_]) -> list[Problem]:
        """A warning if runs of spans lasted too long for their times to be certain."""
        if not (number := int((self.is_ambiguous & is_span).sum())):
            return []
        seconds = _WRAP * (1 << self.shift) / self.ticks_per_second
        text = (
            f"rank {rank}: {count(number, 'track')} ran for more than {seconds:.0f} s, or may have; "
            "times of spans there may be early by multiples of that"
        )
        return [Problem("warning", "ambiguous_time", rank, -1, text, number)]


def _packed_ticks(dump: Dump) -> int:
    """Ticks of the rank's clock when its dump was packed, by the last reading of both clocks; the largest if unknown.

    A thousandth is added: no clock is that much faster than the host's.
    """
    samples = dump.clock_samples()
    brackets = samples[samples["kind"] == fmt.SampleKind.HOST_BRACKET]
    if not len(brackets):
        return dump.max_ticks
    last = brackets[np.argmax(brackets["t1"])]
    since_ns = max(0, int(dump.metadata["packed_ns"]) - int(last["t0"]))
    ticks = int(last["t1"]) + since_ns * int(dump.metadata["clock"]["ticks_per_second"]) // 10**9 * 1001 // 1000
    return min(ticks, dump.max_ticks)
