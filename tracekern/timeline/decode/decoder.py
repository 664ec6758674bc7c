"""From one dump to a Timeline in ticks, and what was wrong with it. Later stages never see the binary format.

Runs of writers are decoded some at a time, in the order of their tracks in the Timeline: the work stays in the cache,
and the peak of memory is little more than the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.dump.reader import Dump
from tracekern.timeline.columns import join_rows, rows_of_ranges
from tracekern.timeline.decode.dense_probes import dense_probes
from tracekern.timeline.decode.event_tables import EventNumbers, doubtful_events
from tracekern.timeline.decode.launch_lanes import add_launch_lanes
from tracekern.timeline.decode.pairing import pair
from tracekern.timeline.decode.problems import Seen, find_problems
from tracekern.timeline.decode.record_columns import Records, WriterRuns, read_runs
from tracekern.timeline.decode.track_merge import merge_tracks
from tracekern.timeline.model import OPEN_END, Int32, Int64, Launch, Marks, Rank, Spans, Timeline

_BATCH_RECORDS = 1 << 18


def decode(dump: Dump) -> Timeline:
    """The Timeline of one rank, unit "ticks"; losses and oddities are in `problems`.

    Raises BadInput for a bad event table.
    """
    runs, area = read_runs(dump)
    merge = merge_tracks(dump, runs)
    events = EventNumbers(dump)
    doubts = doubtful_events(dump.rank, events.types())
    seen = Seen(runs, merge)
    spans: list[Spans] = []
    marks: list[Marks] = []
    for batch in _batches(merge.sorted_runs, runs.written):
        decoded = _decode_batch(area, runs, batch, events, merge.track, seen)
        spans.append(decoded[0])
        marks.append(decoded[1])
    timeline = Timeline(
        unit="ticks",
        ranks=(_rank(dump),),
        tracks=merge.tracks,
        events=events.types(),
        launches=_launches(dump, runs),
        marks=join_rows(marks, Marks()),
        title=dump.metadata["note"],
    )
    timeline = add_launch_lanes(timeline, runs)
    spans.append(timeline.spans)
    timeline = timeline.replace(spans=join_rows(spans, Spans()))
    rank = timeline.ranks[0]
    return timeline.replace(
        problems=(
            *find_problems(timeline, dump, seen),
            *doubts,
            *events.unknown(dump),
            *dense_probes(timeline, dump, runs),
            *runs.rates.describe(rank.rank, rank.ticks_per_second),
        )
    )


def _batches(sorted_runs: Int64, written: Int64) -> Iterator[Int64]:
    """Consecutive runs of about _BATCH_RECORDS records together."""
    if len(sorted_runs):
        batch = np.cumsum(written[sorted_runs]) // _BATCH_RECORDS
        yield from np.split(sorted_runs, np.flatnonzero(np.diff(batch)) + 1)


def _decode_batch(
    area: npt.NDArray[Any], runs: WriterRuns, batch: Int64, events: EventNumbers, track_of_run: Int32, seen: Seen
) -> tuple[Spans, Marks]:
    records = Records(_gather(area, runs.first[batch], runs.written[batch]), runs)
    run_of = np.repeat(np.arange(len(batch), dtype=np.int32), runs.written[batch])
    where = np.flatnonzero(records.kind - np.uint8(1) < 3).astype(np.int32)  # begin, end or mark
    kind, event, owner = records.kind[where], records.event(where), run_of[where]
    ticks, backwards = _forward_only(runs.to_ticks(records.stamps(where), batch, owner), owner)
    launch, track = runs.launch[batch], track_of_run[batch]
    type_of = events.number(launch[owner], event)

    spanning = np.flatnonzero(kind != fmt.RecordKind.MARK).astype(np.int32)
    pairs = pair(kind[spanning] == fmt.RecordKind.BEGIN, event[spanning], owner[spanning])
    is_open = pairs.end < 0
    begin, end = spanning[pairs.begin], spanning[pairs.end]
    spans = Spans(
        track=track[owner[begin]],
        event=type_of[begin],
        launch=launch[owner[begin]],
        start=ticks[begin],
        end=np.where(is_open, OPEN_END, ticks[end]),
        begin_payload=records.payload(where[begin]),
        end_payload=np.where(is_open, np.uint64(0), records.payload(where[end])),
    )
    marked = np.flatnonzero(kind == fmt.RecordKind.MARK).astype(np.int32)
    marks = Marks(
        track=track[owner[marked]],
        event=type_of[marked],
        launch=launch[owner[marked]],
        time=ticks[marked],
        payload=records.payload(where[marked]),
    )
    is_cut = runs.overwritten[batch][owner[spanning[pairs.orphan]]] > 0
    cut, orphan = spanning[pairs.orphan[is_cut]], spanning[pairs.orphan[~is_cut]]
    if len(cut):
        first = np.searchsorted(owner, owner[cut])
        since_oldest = Spans(
            track=track[owner[cut]],
            event=events.without_begin(type_of[cut]),
            launch=launch[owner[cut]],
            start=ticks[first],
            end=ticks[cut],
            begin_payload=np.ones(len(cut), np.uint64),
            end_payload=records.payload(where[cut]),
        )
        # In front of what begins later in the same run; the outer ones, which end later, in front of the inner ones.
        before = np.lexsort((np.concatenate([-cut, begin]), np.concatenate([first * 2, begin * 2 + 1])))
        spans = join_rows([since_oldest, spans], Spans()).take(before)
    strange = np.flatnonzero((records.kind == fmt.RecordKind.EMPTY) | (records.kind > fmt.RecordKind.MARK))
    seen.orphans.append(track[owner[orphan]])
    seen.strange.append(track[run_of[strange]])
    seen.backwards.append(track[backwards])
    return spans, marks


def _gather(area: npt.NDArray[Any], first: Int64, written: Int64) -> npt.NDArray[Any]:
    """The records of some runs one after the other."""
    in_a_row = (first[1:] == first[:-1] + written[:-1]).all()
    return area[first[0] : first[-1] + written[-1]] if in_a_row else area[rows_of_ranges(first, written)]


def _forward_only(ticks: Int64, owner: Int32) -> tuple[Int64, Int32]:
    """Ticks that never fall within a run, and the runs where they did: a torn record, or a clock that stepped back."""
    falls = (ticks[1:] < ticks[:-1]) & (owner[1:] == owner[:-1])
    backwards = np.unique(owner[1:][falls])
    for run in backwards.tolist():
        rows = slice(*np.searchsorted(owner, [run, run + 1]).tolist())
        ticks[rows] = np.maximum.accumulate(ticks[rows])
    return ticks, backwards


def _launches(dump: Dump, runs: WriterRuns) -> tuple[Launch, ...]:
    lost, overwritten = runs.lost, runs.overwritten
    stamp_error_ns = runs.rates.stamp_error * 1e9 / dump.metadata["clock"]["ticks_per_second"]
    needed = np.maximum(runs.attempted, runs.written)
    stops = np.cumsum([entry.num_tracks for entry in dump.launches], dtype=np.int64).tolist()
    launches = []
    for entry, stop in zip(dump.launches, stops, strict=True):
        rows = slice(stop - entry.num_tracks, stop)
        told = runs.epoch[rows][runs.epoch[rows] != 0]
        launches.append(
            Launch(
                rank=dump.rank,
                launch_idx=entry.launch_idx,
                name=entry.name,
                sequence=entry.sequence,
                stream=entry.stream,
                epoch=int(told[0]) if len(told) else entry.epoch,
                num_blocks=entry.num_blocks,
                warps_per_block=entry.warps_per_block,
                num_tracks=entry.num_tracks,
                records_per_track=entry.records_per_track,
                records_lost=int(lost[rows].sum()),
                records_needed=int(needed[rows].max(initial=0)),
                blocks_run=entry.blocks_run,
                shared_tracks=entry.shared_tracks,
                records_overwritten=int(overwritten[rows].sum()),
                stamp_error_ns=float(stamp_error_ns[rows].max(initial=0.0)),
            )
        )
    return tuple(launches)


def _rank(dump: Dump) -> Rank:
    metadata = dump.metadata
    return Rank(
        rank=dump.rank,
        node=metadata["node"],
        device=metadata["device"],
        backend=metadata["backend"],
        state=metadata["state"],
        ticks_per_second=float(metadata["clock"]["ticks_per_second"]),
        resolution_ticks=metadata["clock"]["resolution_ticks"],
        metadata=metadata,
    )
