"""Several Timelines as one: tracks, events, launches and names numbered anew, times from the first event on."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from tracekern.dump.format import MAX_NS
from tracekern.errors import BadInput
from tracekern.timeline.columns import join_rows
from tracekern.timeline.model import OPEN_END, EventClass, EventType, Marks, Spans, Timeline


def concatenate(pieces: list[Timeline]) -> Timeline:
    """All ranks in one Timeline, rebased to the first event; without flows. Empties `pieces`.

    Raises BadInput where its times are so far apart that their differences could not be told.
    """
    events: dict[EventType, int] = {}
    names: dict[str, int] = {}
    spans, marks, problems = [], [], []
    num_tracks = num_launches = 0
    origin = _first_of(pieces)
    for piece in pieces:
        number = np.array([events.setdefault(event, len(events)) for event in piece.events] or [0], np.int32)
        label = np.array([names.setdefault(name, len(names)) for name in piece.host_names] or [0], np.uint64)
        spans.append(_renumber_spans(piece, number, label, num_tracks, num_launches, origin))
        marks.append(
            dataclasses.replace(
                piece.marks,
                track=piece.marks.track + np.int32(num_tracks),
                event=number[piece.marks.event],
                launch=piece.marks.launch + np.int32(num_launches),
                time=piece.marks.time - origin,
            )
        )
        moved = (dataclasses.replace(p, track=p.track + num_tracks if p.track >= 0 else -1) for p in piece.problems)
        problems += list(moved)
        num_tracks += len(piece.tracks)
        num_launches += len(piece.launches)
    tracks = tuple(track for piece in pieces for track in piece.tracks)
    launches = tuple(launch for piece in pieces for launch in piece.launches)
    ranks = tuple(rank for piece in pieces for rank in piece.ranks)
    title = "; ".join(dict.fromkeys(piece.title for piece in pieces if piece.title))
    aligned = all(piece.aligned for piece in pieces)
    pieces.clear()
    return Timeline(
        unit="ns",
        ranks=ranks,
        tracks=tracks,
        events=tuple(events),
        launches=launches,
        spans=join_rows(spans, Spans()),
        marks=join_rows(marks, Marks()),
        host_names=tuple(names),
        problems=tuple(problems),
        origin_ns=origin,
        title=title,
        aligned=aligned,
    )


def _first_of(pieces: list[Timeline]) -> int:
    """The time of the first event."""
    seen = []
    for piece in pieces:
        columns = [column for column in (piece.spans.start, piece.spans.end, piece.marks.time) if len(column)]
        if columns:
            first = min(int(column.min()) for column in (piece.spans.start, piece.marks.time) if len(column))
            seen.append((first, max(int(column.max()) for column in columns), piece.ranks[0].rank))
    if not seen:
        return 0
    (origin, _, early), (_, last, late) = min(seen), max(seen, key=lambda entry: entry[1])
    if last - origin >= MAX_NS:
        raise BadInput(
            f"rank {late}: an event at {last} ns, and one of rank {early} at {origin} ns: wanted less than 2^62 ns "
            "between them; a dump or a profile is damaged: record again, or leave that rank out"
        )
    return origin


def _renumber_spans(
    piece: Timeline,
    number: npt.NDArray[np.int32],
    label: npt.NDArray[np.uint64],
    num_tracks: int,
    num_launches: int,
    origin: int,
) -> Spans:
    spans = piece.spans
    is_host = piece.events_of(EventClass.HOST)[spans.event]
    payload = spans.begin_payload
    if is_host.any():
        payload = payload.copy()
        payload[is_host] = label[payload[is_host]]
    return Spans(
        track=spans.track + np.int32(num_tracks),
        event=number[spans.event],
        launch=np.where(spans.launch < 0, np.int32(-1), spans.launch + np.int32(num_launches)),
        start=spans.start - origin,
        end=np.where(spans.end == OPEN_END, OPEN_END, spans.end - origin),
        begin_payload=payload,
        end_payload=spans.end_payload,
    )
