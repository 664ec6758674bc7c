"""The bits of a dump as columns: the runs of records that writers left, and both record formats behind one face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput
from tracekern.record import format as fmt
from tracekern.record.dump import Dump
from tracekern.timeline.model import Int32, Int64, UInt64

_MAX_TICKS = 1 << 62


@dataclass(frozen=True)
class Runs:
    """[num_runs] columns. A run is what one writer left of one launch; a track is many runs, one after the other."""

    launch: Int32
    """Index into the dump's launches."""
    block: Int64
    warp: Int64
    role: Int64
    sm: Int64
    epoch: Int64
    start: Int64
    end: Int64
    """0 where it never finished."""
    last: Int64
    """The latest ticks known of the run."""
    first: Int64
    """Index of its first record in the records area."""
    written: Int64
    attempted: Int64
    torn: Int64
    """Records that should be there and never arrived; rings only."""
    started: npt.NDArray[np.bool_]
    finished: npt.NDArray[np.bool_]
    ring: npt.NDArray[np.bool_]
    """Kept its last records, not its first."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def lost(self) -> Int64:
        """[num_runs] records that found no room."""
        return np.where(self.finished & ~self.ring, np.maximum(self.attempted - self.written, 0), 0)

    @property
    def overwritten(self) -> Int64:
        """[num_runs] records of a ring that made room for later ones."""
        return np.where(self.ring, np.maximum(self.attempted - self.written - self.torn, 0), 0)


def read_runs(dump: Dump) -> tuple[Runs, npt.NDArray[Any]]:
    """The runs of all launches, and the records area: one view from the first launch's records to the last launch's.

    Raises BadInput for ticks beyond 2^62.
    """
    counts = np.array([launch.num_tracks for launch in dump.launches], np.int64)
    headers = np.concatenate([np.empty(0, fmt.TRACK_HEADER), *map(dump.track_headers, dump.launches)])
    launch = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    written = headers["written"].astype(np.int64)
    area, launch_first = _records_area(dump)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(written)])
    first = before[:-1] + (launch_first - before[np.cumsum(counts) - counts])[launch]
    for key in ("start_ticks", "end_ticks"):
        if len(headers) and int(headers[key].max()) > _MAX_TICKS:
            raise BadInput(f"{dump.path}: {key} {int(headers[key].max())} is beyond 2^62; damaged")
    start, end = headers["start_ticks"].astype(np.int64), headers["end_ticks"].astype(np.int64)
    last = np.maximum(start, end)
    filled = written > 0
    last[filled] = np.maximum(last[filled], _last_record_ticks(area, (first + written - 1)[filled], start[filled]))
    columns = {
        key: headers[key].astype(np.int64) for key in ("block", "warp", "role", "sm", "epoch", "attempted", "torn")
    }
    runs = Runs(
        launch=launch,
        start=start,
        end=end,
        last=last,
        first=first,
        written=written,
        started=headers["started"] != 0,
        finished=headers["finished"] != 0,
        ring=headers["started"] == fmt.STARTED_RING,
        **columns,
    )
    return runs, area


def _records_area(dump: Dump) -> tuple[npt.NDArray[Any], Int64]:
    """The area, and [num_launches] index of each launch's first record in it."""
    record_bytes = dump.record_dtype.itemsize
    start = dump.launches[0].records_offset if dump.launches else 0
    stop = max((entry.records_offset + entry.records_count * record_bytes for entry in dump.launches), default=0)
    area = dump.payload[start:stop].view(dump.record_dtype)
    return area, np.array([(entry.records_offset - start) // record_bytes for entry in dump.launches], np.int64)


def _last_record_ticks(area: npt.NDArray[Any], where: Int64, start: Int64) -> Int64:
    """Ticks of the last record of runs that began at `start`; a guess within 4.29 s where a compact one wrapped."""
    if area.dtype == fmt.WIDE_RECORD:
        ticks: UInt64 = np.minimum(area["ticks"][where], np.uint64(_MAX_TICKS))
        return ticks.view(np.int64)
    low: Int64 = area["ticks_low"][where].astype(np.int64)
    return start + ((low - start) & 0xFFFFFFFF)


class Records:
    """[n] records of some runs, one run after the other, wide or compact."""

    def __init__(self, raw: npt.NDArray[Any], run_first: Int64, run_start: Int64) -> None:
        self._raw = raw
        self.kind = (raw["word"] & np.uint32(fmt.KIND_MASK)).astype(np.uint8)
        self._high = self._time_high(run_first, run_start) if raw.dtype == fmt.COMPACT_RECORD else None

    def __len__(self) -> int:
        return len(self.kind)

    def event(self, where: Int32) -> npt.NDArray[np.uint8]:
        event: npt.NDArray[np.uint32] = self._raw["word"][where] >> np.uint32(fmt.EVENT_SHIFT)
        event &= np.uint32(fmt.EVENT_MASK)
        return event.astype(np.uint8)

    def ticks(self, where: Int32) -> Int64:
        """Ticks of the records at `where`. Raises BadInput beyond 2^62."""
        if self._high is None:
            ticks: UInt64 = self._raw["ticks"][where]
        else:
            ticks = self._high[where].astype(np.uint64) << np.uint64(32)
            ticks |= self._raw["ticks_low"][where]
        if len(ticks) and int(ticks.max()) > _MAX_TICKS:
            raise BadInput(f"a record's ticks {int(ticks.max())} are beyond 2^62; the dump is damaged")
        return ticks.view(np.int64)

    def payload(self, where: Int32) -> UInt64:
        if self._high is None:
            payload: UInt64 = self._raw["payload_high"][where].astype(np.uint64)
        else:
            before = np.maximum(where - 1, 0)
            extended = self.kind[before] == fmt.RecordKind.EXTEND
            payload = np.where(extended, self._raw["ticks_low"][before], 0).astype(np.uint64)
        payload <<= np.uint64(fmt.PAYLOAD_LOW_BITS)
        payload |= self._raw["word"][where] >> np.uint32(fmt.PAYLOAD_SHIFT)
        return payload

    def _time_high(self, run_first: Int64, run_start: Int64) -> npt.NDArray[np.uint32]:
        """[n] high 32 bits of the ticks: those of the run's start until a time_high record says otherwise."""
        changes = np.flatnonzero(self.kind == fmt.RecordKind.TIME_HIGH)
        at = np.concatenate([run_first, changes])
        value = np.concatenate([(run_start >> 32).astype(np.uint32), self._raw["ticks_low"][changes]])
        order = np.argsort(at, kind="stable")
        at, value = at[order], value[order]
        return np.repeat(value, np.diff(at, append=len(self)))
