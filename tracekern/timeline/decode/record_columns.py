"""The bits of a dump as columns: the runs of records that writers left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.dump.reader import Dump
from tracekern.timeline.columns import rows_of_ranges
from tracekern.timeline.decode.cycle_clock import CycleRates
from tracekern.timeline.decode.short_times import ShortTimes
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
    missing: Int64
    """Records that should be there and never arrived: torn, of a ring; of unfinished work, in a run of spans."""
    warps_run: Int64
    """How many warps the block had, told by its first warp if they are more than the host stated; else 0."""
    started: npt.NDArray[np.bool_]
    finished: npt.NDArray[np.bool_]
    ring: npt.NDArray[np.bool_]
    """Kept its last records, not its first."""
    is_span: npt.NDArray[np.bool_]
    """Its records are SPAN_RECORD, not WIDE_RECORD."""
    times: ShortTimes
    """Times of the runs that hold SPAN_RECORD."""
    rates: CycleRates
    """Rates of the runs whose records count cycles."""
    max_ticks: int
    """Any tick beyond it is damage."""
    path: Path
    """The dump."""

    def __len__(self) -> int:
        return len(self.first)

    def to_ticks(self, stamps: Int64, some: Int64, owner: Int32) -> Int64:
        """[n] ticks of [n] stamps of WIDE_RECORDs; that of number i belongs to the run some[owner[i]]."""
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
        return np.where(self.ring, np.maximum(self.attempted - self.written - self.missing, 0), 0)


def read_runs(dump: Dump) -> tuple[WriterRuns, npt.NDArray[Any]]:
    """The runs of all launches, and the records area: one view from the first launch's records to the last launch's.

    The area is [n] WIDE_RECORD; where a run is of spans, its part is to be viewed as SPAN_RECORD.
    """
    counts = np.array([launch.num_tracks for launch in dump.launches], np.int64)
    headers = dump.all_track_headers()
    launch = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    written = headers["written"].astype(np.int64)
    area, launch_first = _records_area(dump)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(written)])
    first = before[:-1] + (launch_first - before[np.cumsum(counts) - counts])[launch]
    start, end = headers["start_ticks"].astype(np.int64), headers["end_ticks"].astype(np.int64)
    rates = CycleRates.of(headers, dump.metadata["clock"]["resolution_ticks"])
    is_span = headers["started"] == fmt.STARTED
    times = ShortTimes.of(start, end, dump)
    last = _last_ticks(area, first, written, start, end, is_span, times, rates, dump.max_ticks)
    names = ("block", "warp", "role", "sm", "epoch", "attempted", "missing", "warps_run")
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
        is_span=is_span,
        times=times,
        rates=rates,
        max_ticks=dump.max_ticks,
        path=dump.path,
        **columns,
    )
    return runs, area


def _last_ticks(
    area: npt.NDArray[Any],
    first: Int64,
    written: Int64,
    start: Int64,
    end: Int64,
    is_span: npt.NDArray[np.bool_],
    times: ShortTimes,
    rates: CycleRates,
    max_ticks: int,
) -> Int64:
    """[num_runs] the latest ticks known: its end, or the last record of a run that has none."""
    last = np.maximum(start, end)
    filled = np.flatnonzero((written > 0) & ~is_span)
    stamps: UInt64 = np.minimum(area["ticks"][(first + written - 1)[filled]], np.uint64(max_ticks))
    of_records = rates.take(filled).to_ticks(start[filled], stamps.view(np.int64), max_ticks)
    last[filled] = np.maximum(last[filled], of_records)
    cut = np.flatnonzero((written > 0) & is_span & (end == 0))
    if len(cut):
        rows = area[rows_of_ranges(first[cut], written[cut])].view(fmt.SPAN_RECORD)
        owner = np.repeat(np.arange(len(cut), dtype=np.int32), written[cut])
        begin, stop, _ = times.of_records(rows, cut, owner)
        latest = np.maximum.reduceat(np.maximum(begin, stop), np.cumsum(written[cut]) - written[cut])
        last[cut] = np.maximum(last[cut], latest)
    return last


def _records_area(dump: Dump) -> tuple[npt.NDArray[Any], Int64]:
    """The area, and [num_launches] index of each launch's first record in it."""
    start = dump.launches[0].records_offset if dump.launches else 0
    stop = max((entry.records_offset + entry.records_count * fmt.RECORD_BYTES for entry in dump.launches), default=0)
    area = dump.payload[start:stop].view(fmt.WIDE_RECORD)
    return area, np.array([(entry.records_offset - start) // fmt.RECORD_BYTES for entry in dump.launches], np.int64)


@dataclass(frozen=True)
class Batch:
    """Records of some runs, one run after the other."""

    records: npt.NDArray[Any]
    """[n] WIDE_RECORD; to be viewed as SPAN_RECORD where the runs are of spans."""
    owner: Int32
    """[n] whose it is: an index into the three below."""
    some: Int64
    """Index into `runs`."""
    runs: WriterRuns
    track: Int32
    """Index into the Timeline's tracks, for each of `some`."""

    @property
    def launch(self) -> Int32:
        return self.runs.launch[self.some]


def payload_of(records: npt.NDArray[Any]) -> UInt64:
    """[n] payloads of records of either format."""
    payload: UInt64 = records["payload_high"].astype(np.uint64)
    payload <<= np.uint64(fmt.PAYLOAD_LOW_BITS)
    payload |= records["word"] >> np.uint32(fmt.PAYLOAD_SHIFT)
    return payload


def kind_of(records: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """[n] RecordKind of records of either format."""
    kind: npt.NDArray[np.uint8] = (records["word"] & np.uint32(fmt.KIND_MASK)).astype(np.uint8)
    return kind


def event_of(records: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """[n] event numbers of records of either format."""
    event: npt.NDArray[np.uint8] = (records["word"] >> np.uint32(fmt.EVENT_SHIFT) & np.uint32(fmt.EVENT_MASK)).astype(
        np.uint8
    )
    return event
