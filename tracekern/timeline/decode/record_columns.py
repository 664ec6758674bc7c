"""The bits of a dump as columns: the runs of records that writers left, and the fields of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.dump.reader import Dump
from tracekern.errors import BadInput
from tracekern.timeline.decode.cycle_clock import CycleRates
from tracekern.timeline.model import Int32, Int64, UInt64


@dataclass(frozen=True)
class WriterRuns:
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
    warps_run: Int64
    """Of a block's first warp: how many the block had, where that is more than the host stated; else 0."""
    started: npt.NDArray[np.bool_]
    finished: npt.NDArray[np.bool_]
    ring: npt.NDArray[np.bool_]
    """Kept its last records, not its first."""
    rates: CycleRates
    """Of runs whose records count cycles."""
    max_ticks: int
    """Any tick beyond it is damage."""
    path: Path
    """Of their dump."""

    def __len__(self) -> int:
        return len(self.first)

    def to_ticks(self, stamps: Int64, some: Int64, owner: Int32) -> Int64:
        """[n] ticks of [n] stamps; that of number i belongs to the run some[owner[i]]."""
        rates = self.rates.take(some)
        if not rates.any():
            return stamps
        return rates.take(owner).to_ticks(self.start[some][owner], stamps, self.max_ticks)

    @property
    def lost(self) -> Int64:
        """[num_runs] records that found no room."""
        return np.where(self.finished & ~self.ring, np.maximum(self.attempted - self.written, 0), 0)

    @property
    def overwritten(self) -> Int64:
        """[num_runs] records of a ring that made room for later ones."""
        return np.where(self.ring, np.maximum(self.attempted - self.written - self.torn, 0), 0)


def read_runs(dump: Dump) -> tuple[WriterRuns, npt.NDArray[Any]]:
    """The runs of all launches, and the records area: one view from the first launch's records to the last launch's."""
    max_ticks = dump.max_ticks
    counts = np.array([launch.num_tracks for launch in dump.launches], np.int64)
    headers = dump.all_track_headers()
    launch = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    written = headers["written"].astype(np.int64)
    area, launch_first = _records_area(dump)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(written)])
    first = before[:-1] + (launch_first - before[np.cumsum(counts) - counts])[launch]
    start, end = headers["start_ticks"].astype(np.int64), headers["end_ticks"].astype(np.int64)
    rates = CycleRates.of(headers, dump.metadata["clock"]["resolution_ticks"])
    last = np.maximum(start, end)
    filled = np.flatnonzero(written > 0)
    stamps: UInt64 = np.minimum(area["ticks"][(first + written - 1)[filled]], np.uint64(max_ticks))
    of_records = rates.take(filled).to_ticks(start[filled], stamps.view(np.int64), max_ticks)
    last[filled] = np.maximum(last[filled], of_records)
    names = ("block", "warp", "role", "sm", "epoch", "attempted", "torn", "warps_run")
    columns = {key: headers[key].astype(np.int64) for key in names}
    runs = WriterRuns(
        launch=launch,
        start=start,
        end=end,
        last=last,
        first=first,
        written=written,
        started=headers["started"] != 0,
        finished=headers["finished"] != 0,
        ring=headers["started"] == fmt.STARTED_RING,
        rates=rates,
        max_ticks=max_ticks,
        path=dump.path,
        **columns,
    )
    return runs, area


def _records_area(dump: Dump) -> tuple[npt.NDArray[Any], Int64]:
    """The area, and [num_launches] index of each launch's first record in it."""
    record_bytes = fmt.WIDE_RECORD.itemsize
    start = dump.launches[0].records_offset if dump.launches else 0
    stop = max((entry.records_offset + entry.records_count * record_bytes for entry in dump.launches), default=0)
    area = dump.payload[start:stop].view(fmt.WIDE_RECORD)
    return area, np.array([(entry.records_offset - start) // record_bytes for entry in dump.launches], np.int64)


class Records:
    """[n] WIDE_RECORD of some runs, one run after the other."""

    def __init__(self, raw: npt.NDArray[Any], runs: WriterRuns) -> None:
        self._raw, self._runs = raw, runs
        self.kind = (raw["word"] & np.uint32(fmt.KIND_MASK)).astype(np.uint8)

    def __len__(self) -> int:
        return len(self.kind)

    def event(self, where: Int32) -> npt.NDArray[np.uint8]:
        event: npt.NDArray[np.uint32] = self._raw["word"][where] >> np.uint32(fmt.EVENT_SHIFT)
        event &= np.uint32(fmt.EVENT_MASK)
        return event.astype(np.uint8)

    def stamps(self, where: Int32) -> Int64:
        """Ticks or cycles of the records at `where`. Raises BadInput beyond the runs' max_ticks."""
        ticks: UInt64 = self._raw["ticks"][where]
        if len(ticks) and int(ticks.max()) > self._runs.max_ticks:
            what = f"a record's ticks {int(ticks.max())} are beyond {self._runs.max_ticks}"
            raise BadInput(f"{self._runs.path}: {what}; damaged")
        return ticks.view(np.int64)

    def payload(self, where: Int32) -> UInt64:
        payload: UInt64 = self._raw["payload_high"][where].astype(np.uint64)
        payload <<= np.uint64(fmt.PAYLOAD_LOW_BITS)
        payload |= self._raw["word"][where] >> np.uint32(fmt.PAYLOAD_SHIFT)
        return payload
