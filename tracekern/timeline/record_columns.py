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
    first: Int64
    """Index of its first record in the records area."""
    written: Int64
    attempted: Int64
    started: npt.NDArray[np.bool_]
    finished: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.first)


def read_runs(dump: Dump) -> tuple[Runs, npt.NDArray[Any]]:
    """The runs of all launches, and the records area: one view from the first launch's records to the last launch's.

    Between two launches the area holds padding. Raises BadInput where that is not empty or ticks are beyond 2^62.
    """
    record_bytes = dump.record_dtype.itemsize
    counts = np.array([launch.num_tracks for launch in dump.launches], np.int64)
    headers = np.concatenate([np.empty(0, fmt.TRACK_HEADER), *map(dump.track_headers, dump.launches)])
    launch = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    written = headers["written"].astype(np.int64)
    area_start = dump.launches[0].records_offset if dump.launches else 0
    area_stop = max((entry.records_offset + entry.records_count * record_bytes for entry in dump.launches), default=0)
    area = dump.payload[area_start:area_stop].view(dump.record_dtype)
    launch_first = np.array([(entry.records_offset - area_start) // record_bytes for entry in dump.launches], np.int64)
    before = np.cumsum(written) - written
    launch_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(written)])[np.cumsum(counts) - counts]
    first = before + (launch_first - launch_before)[launch]
    _check_padding(dump, area, launch_first)
    for key in ("start_ticks", "end_ticks"):
        if len(headers) and int(headers[key].max()) > _MAX_TICKS:
            raise BadInput(f"{dump.path}: {key} {int(headers[key].max())} is beyond 2^62; damaged")
    columns = {key: headers[key].astype(np.int64) for key in ("block", "warp", "role", "sm", "epoch", "attempted")}
    runs = Runs(
        launch=launch,
        start=headers["start_ticks"].astype(np.int64),
        end=headers["end_ticks"].astype(np.int64),
        first=first,
        written=written,
        started=headers["started"] != 0,
        finished=headers["finished"] != 0,
        **columns,
    )
    return runs, area


def _check_padding(dump: Dump, area: npt.NDArray[Any], launch_first: Int64) -> None:
    stops = launch_first + np.array([entry.records_count for entry in dump.launches], np.int64)
    gaps = launch_first[1:] - stops[:-1]
    if len(gaps) == 0 or not gaps.any():
        return
    where = np.repeat(stops[:-1] - (np.cumsum(gaps) - gaps), gaps) + np.arange(gaps.sum())
    if area["word"][where].any():
        raise BadInput(f"{dump.path}: something stands between the records of two launches; damaged")


class Records:
    """[n] records of the area, wide or compact."""

    def __init__(self, area: npt.NDArray[Any], runs: Runs) -> None:
        self._area = area
        self.kind = (area["word"] & np.uint32(fmt.KIND_MASK)).astype(np.uint8)
        self._high = self._time_high(runs) if area.dtype == fmt.COMPACT_RECORD else None

    def __len__(self) -> int:
        return len(self.kind)

    def event(self, where: Int32) -> npt.NDArray[np.uint8]:
        event: npt.NDArray[np.uint32] = self._area["word"][where] >> np.uint32(fmt.EVENT_SHIFT)
        event &= np.uint32(fmt.EVENT_MASK)
        return event.astype(np.uint8)

    def ticks(self, where: Int32) -> Int64:
        """Ticks of the records at `where`. Raises BadInput beyond 2^62."""
        if self._high is None:
            ticks: UInt64 = self._area["ticks"][where]
        else:
            ticks = self._high[where].astype(np.uint64) << np.uint64(32)
            ticks |= self._area["ticks_low"][where]
        if len(ticks) and int(ticks.max()) > _MAX_TICKS:
            raise BadInput(f"a record's ticks {int(ticks.max())} are beyond 2^62; the dump is damaged")
        return ticks.view(np.int64)

    def payload(self, where: Int32) -> UInt64:
        if self._high is None:
            payload: UInt64 = self._area["payload_high"][where].astype(np.uint64)
        else:
            before = np.maximum(where - 1, 0)
            extended = self.kind[before] == fmt.RecordKind.EXTEND
            payload = np.where(extended, self._area["ticks_low"][before], 0).astype(np.uint64)
        payload <<= np.uint64(fmt.PAYLOAD_LOW_BITS)
        payload |= self._area["word"][where] >> np.uint32(fmt.PAYLOAD_SHIFT)
        return payload

    def _time_high(self, runs: Runs) -> npt.NDArray[np.uint32]:
        """[n] high 32 bits of the ticks: those of the run's start until a time_high record says otherwise."""
        changes = np.flatnonzero(self.kind == fmt.RecordKind.TIME_HIGH)
        at = np.concatenate([np.zeros(1, np.int64), runs.first, changes])
        start_high = (runs.start >> 32).astype(np.uint32)
        value = np.concatenate([np.zeros(1, np.uint32), start_high, self._area["ticks_low"][changes]])
        order = np.argsort(at, kind="stable")
        at, value = at[order], value[order]
        return np.repeat(value, np.diff(at, append=len(self)))
