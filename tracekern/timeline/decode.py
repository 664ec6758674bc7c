"""From one dump to a Timeline in ticks, and what was wrong with it. Right of here nobody knows bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracekern.record import format as fmt
from tracekern.record.dump import Dump
from tracekern.timeline.decode_problems import Findings, find_problems
from tracekern.timeline.event_tables import parse_event_table, unknown_event
from tracekern.timeline.launch_lanes import add_launch_lanes
from tracekern.timeline.model import OPEN_END, EventType, Int32, Int64, Launch, Marks, Rank, Spans, Timeline
from tracekern.timeline.pairing import pair
from tracekern.timeline.record_columns import Records, Runs, read_runs
from tracekern.timeline.track_merge import merge_tracks


def decode(dump: Dump) -> Timeline:
    """The Timeline of one rank, unit "ticks"; losses and oddities stand in `problems`.

    Raises BadInput for a bad event table.
    """
    runs, area = read_runs(dump)
    records = Records(area, runs)
    run_of = _run_of_record(runs, len(records))
    where = np.flatnonzero(records.kind - np.uint8(1) < 3).astype(np.int32)  # begin, end or mark
    where = where[run_of[where] >= 0]
    kind, event, owner = records.kind[where], records.event(where), run_of[where]
    ticks, backwards = _forward_only(records.ticks(where), owner)
    last = _last_ticks(runs, ticks, owner)
    merge = merge_tracks(dump, runs, last)
    events, type_of = _number_events(dump, event, runs.launch[owner])

    spanning = np.flatnonzero(kind != fmt.RecordKind.MARK).astype(np.int32)
    pairs = pair(kind[spanning] == fmt.RecordKind.BEGIN, event[spanning], owner[spanning])
    order = merge.order(owner[spanning[pairs.begin]])
    is_open = (pairs.end < 0)[order]
    begin, end = spanning[pairs.begin[order]], spanning[pairs.end[order]]
    spans = Spans(
        track=merge.track[owner[begin]],
        event=type_of[begin],
        launch=runs.launch[owner[begin]],
        start=ticks[begin],
        end=np.where(is_open, OPEN_END, ticks[end]),
        begin_payload=records.payload(where[begin]),
        end_payload=np.where(is_open, np.uint64(0), records.payload(where[end])),
    )
    marked = np.flatnonzero(kind == fmt.RecordKind.MARK)
    marked = marked[merge.order(owner[marked])]
    marks = Marks(
        track=merge.track[owner[marked]],
        event=type_of[marked],
        launch=runs.launch[owner[marked]],
        time=ticks[marked],
        payload=records.payload(where[marked]),
    )
    timeline = Timeline(
        unit="ticks",
        ranks=(_rank(dump),),
        tracks=merge.tracks,
        events=events,
        launches=_launches(dump, runs),
        spans=spans,
        marks=marks,
        title=dump.metadata["note"],
    )
    timeline = add_launch_lanes(timeline, runs, last)
    orphans = owner[spanning[pairs.orphan]]
    strange = run_of[np.flatnonzero((records.kind == fmt.RecordKind.EMPTY) | (records.kind > fmt.RecordKind.TIME_HIGH))]
    findings = Findings(runs, merge, merge.track[orphans], merge.track[strange[strange >= 0]], merge.track[backwards])
    return timeline.replace(problems=find_problems(timeline, dump, findings))


def _run_of_record(runs: Runs, num_records: int) -> Int32:
    """[num_records] the run of each record; -1 for the padding between launches."""
    gaps = np.append(runs.first[1:], num_records) - (runs.first + runs.written) if len(runs) else np.empty(0, np.int64)
    numbers = np.stack([np.arange(len(runs), dtype=np.int32), np.full(len(runs), -1, np.int32)], axis=1)
    return np.repeat(numbers.ravel(), np.stack([runs.written, gaps], axis=1).ravel())


def _forward_only(ticks: Int64, owner: Int32) -> tuple[Int64, Int32]:
    """Ticks that never fall within a run, and the runs where they did: a torn record, or a clock that stepped back."""
    falls = (ticks[1:] < ticks[:-1]) & (owner[1:] == owner[:-1])
    backwards = np.unique(owner[1:][falls])
    for run in backwards.tolist():
        rows = slice(*np.searchsorted(owner, [run, run + 1]).tolist())
        ticks[rows] = np.maximum.accumulate(ticks[rows])
    return ticks, backwards


def _last_ticks(runs: Runs, ticks: Int64, owner: Int32) -> Int64:
    """[num_runs] the latest ticks known of each run."""
    last = np.maximum(runs.start, runs.end)
    stops = np.searchsorted(owner, np.arange(len(runs)), "right") - 1
    some = (
        (stops >= 0) & (owner[np.maximum(stops, 0)] == np.arange(len(runs)))
        if len(owner)
        else np.zeros(len(runs), bool)
    )
    last[some] = np.maximum(last[some], ticks[stops[some]])
    return last


def _number_events(dump: Dump, event: npt.NDArray[np.uint8], launch: Int32) -> tuple[tuple[EventType, ...], Int32]:
    """All events of the dump's tables, each once, and [n] indices into them for the records' own numbers."""
    known: dict[EventType, int] = {}
    tables = dump.metadata["event_tables"]
    number = np.full((max(1, len(tables)), fmt.MAX_EVENTS), -1, np.int32)
    for idx, table in enumerate(tables):
        for row, entry in enumerate(parse_event_table(str(dump.path), table)):
            number[idx, row] = known.setdefault(entry, len(known))
    table_of_launch = np.array([entry.event_table for entry in dump.launches], np.int32)
    cell = table_of_launch[launch] * np.int32(fmt.MAX_EVENTS) + event
    for unknown in np.flatnonzero((np.bincount(cell, minlength=number.size) > 0) & (number.ravel() < 0)).tolist():
        number.ravel()[unknown] = known.setdefault(unknown_event(unknown % fmt.MAX_EVENTS), len(known))
    return tuple(known), number.ravel()[cell]


def _launches(dump: Dump, runs: Runs) -> tuple[Launch, ...]:
    lost = np.where(runs.finished, np.maximum(runs.attempted - runs.written, 0), 0)
    needed = np.maximum(runs.attempted, runs.written)
    stops = np.cumsum([entry.num_tracks for entry in dump.launches], dtype=np.int64).tolist()
    launches = []
    for entry, stop in zip(dump.launches, stops, strict=True):
        rows = slice(stop - entry.num_tracks, stop)
        epochs = runs.epoch[rows][runs.started[rows]]
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
