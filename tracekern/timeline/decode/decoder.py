"""From one dump to a Timeline in ticks, and what was wrong with it. Later stages never see the binary format.

Runs of writers are decoded some at a time, in the order of their tracks in the Timeline: the work stays in the cache,
and the peak of memory is little more than the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump.reader import Dump
from tracekern.timeline.columns import join_rows, rows_of_ranges
from tracekern.timeline.decode.dense_probes import dense_probes
from tracekern.timeline.decode.engine_tracks import add_engines
from tracekern.timeline.decode.event_tables import (
    EventNumbers,
    doubtful_events,
    groups_of_launches,
    members_of_launches,
)
from tracekern.timeline.decode.launch_lanes import add_launch_lanes
from tracekern.timeline.decode.pair_records import decode_pairs
from tracekern.timeline.decode.problems import Seen, find_problems
from tracekern.timeline.decode.record_columns import Batch, WriterRuns, read_runs
from tracekern.timeline.decode.span_records import decode_spans
from tracekern.timeline.decode.track_merge import merge_tracks
from tracekern.timeline.model import Int32, Int64, Launch, Marks, Rank, Spans, Timeline

_BATCH_RECORDS = 1 << 18


def decode(dump: Dump) -> Timeline:
    """The Timeline of one rank, unit "ticks"; losses and oddities are in `problems`.

    Tracks of engines are in ns of the host's time. Raises BadInput for a bad event table.
    """
    return add_engines(_decode_launches(dump.part(by_host=False)), dump.part(by_host=True))


def _decode_launches(dump: Dump) -> Timeline:
    runs, area = read_runs(dump)
    merge = merge_tracks(dump, runs)
    events = EventNumbers(dump)
    doubts = doubtful_events(dump.rank, events.types())
    seen = Seen(runs, merge)
    spans: list[Spans] = []
    marks: list[Marks] = []
    for batch in _batches(merge.sorted_runs, runs):
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
            *runs.times.describe(rank.rank, runs.is_span & runs.started),
        )
    )


def _batches(sorted_runs: Int64, runs: WriterRuns) -> Iterator[Int64]:
    """Consecutive runs of one format, of about _BATCH_RECORDS records together."""
    if len(sorted_runs):
        batch = np.cumsum(runs.written[sorted_runs]) // _BATCH_RECORDS
        is_next = (np.diff(batch) != 0) | np.diff(runs.is_span[sorted_runs])
        yield from np.split(sorted_runs, np.flatnonzero(is_next) + 1)


def _decode_batch(
    area: npt.NDArray[Any], runs: WriterRuns, batch: Int64, events: EventNumbers, track_of_run: Int32, seen: Seen
) -> tuple[Spans, Marks]:
    """batch: runs of one format, as indices into `runs`."""
    records = _gather(area, runs.first[batch], runs.written[batch])
    owner = np.repeat(np.arange(len(batch), dtype=np.int32), runs.written[batch])
    decode_records = decode_spans if runs.is_span[batch[0]] else decode_pairs
    return decode_records(Batch(records, owner, batch, runs, track_of_run[batch]), events, seen)


def _gather(area: npt.NDArray[Any], first: Int64, written: Int64) -> npt.NDArray[Any]:
    """The records of some runs one after the other."""
    in_a_row = (first[1:] == first[:-1] + written[:-1]).all()
    return area[first[0] : first[-1] + written[-1]] if in_a_row else area[rows_of_ranges(first, written)]


def _launches(dump: Dump, runs: WriterRuns) -> tuple[Launch, ...]:
    lost, overwritten = runs.lost, runs.overwritten
    stamp_error_ns = runs.rates.stamp_error * 1e9 / dump.metadata["clock"]["ticks_per_second"]
    needed = np.maximum(runs.attempted, runs.written)
    stops = np.cumsum([entry.num_tracks for entry in dump.launches], dtype=np.int64).tolist()
    launches = []
    told = zip(groups_of_launches(dump), members_of_launches(dump), strict=True)
    for entry, stop, (groups, members) in zip(dump.launches, stops, told, strict=True):
        rows = slice(stop - entry.num_tracks, stop)
        epochs = runs.epoch[rows][runs.epoch[rows] != 0]
        launches.append(
            Launch(
                rank=dump.rank,
                launch_idx=entry.launch_idx,
                name=entry.name,
                sequence=entry.sequence,
                stream=entry.stream,
                epoch=int(epochs[0]) if len(epochs) else entry.epoch,
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
                host_ns=entry.host_ns,
                waited_ns=entry.waited_ns,
                groups=groups[0],
                group_field=groups[1],
                key=entry.key,
                members=members,
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
        clock_id=metadata["clock"].get("id", ""),
    )
