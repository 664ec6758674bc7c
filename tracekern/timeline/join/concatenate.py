"""Several Timelines as one: tracks, events, launches and names numbered anew, times from the first event on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump.format import MAX_NS
from tracekern.errors import BadInput
from tracekern.timeline.model import (
    OPEN_END,
    EventClass,
    EventType,
    Launch,
    Marks,
    Problem,
    Rank,
    Spans,
    Timeline,
    Track,
)


def concatenate(pieces: list[Timeline]) -> Timeline:
    """All ranks in one Timeline, rebased to the first event; without flows. Empties `pieces`.

    Raises BadInput where its times are so far apart that their differences could not be told.
    """
    events: dict[EventType, int] = {}
    names: dict[str, int] = {}
    tracks, launches, ranks, problems = list[Track](), list[Launch](), list[Rank](), list[Problem]()
    titles, aligned, origin = dict[str, None](), all(piece.aligned for piece in pieces), _first_of(pieces)
    spans, marks = (_Filling(kind, sum(map(len, rows))) for kind, rows in _rows_of(pieces))
    while pieces:  # what is copied is not needed any more
        piece = pieces.pop(0)
        number = np.array([events.setdefault(event, len(events)) for event in piece.events] or [0], np.int32)
        label = np.array([names.setdefault(name, len(names)) for name in piece.host_names] or [0], np.uint64)
        spans.add(_renumbered(piece, number, label, len(tracks), len(launches), origin))
        marks.add(
            {
                "track": piece.marks.track + np.int32(len(tracks)),
                "event": number[piece.marks.event],
                "launch": piece.marks.launch + np.int32(len(launches)),
                "time": piece.marks.time - origin,
                "payload": piece.marks.payload,
            }
        )
        moved = (dataclasses.replace(p, track=p.track + len(tracks) if p.track >= 0 else -1) for p in piece.problems)
        problems += list(moved)
        tracks += piece.tracks
        launches += piece.launches
        ranks += piece.ranks
        titles |= {piece.title: None} if piece.title else {}
    return Timeline(
        unit="ns",
        ranks=tuple(ranks),
        tracks=tuple(tracks),
        events=tuple(events),
        launches=tuple(launches),
        spans=Spans(**spans.columns),
        marks=Marks(**marks.columns),
        host_names=tuple(names),
        problems=tuple(problems),
        origin_ns=origin,
        title="; ".join(titles),
        aligned=aligned,
    )


def _rows_of(pieces: list[Timeline]) -> tuple[tuple[Spans | Marks, list[Any]], ...]:
    return (Spans(), [piece.spans for piece in pieces]), (Marks(), [piece.marks for piece in pieces])


class _Filling:
    """Columns that are filled part by part. End payloads that no event has take no memory."""

    def __init__(self, like: Spans | Marks, count: int) -> None:
        made = {True: np.zeros, False: np.empty}  # numpy asks for large pages of the second alone
        self.columns: dict[str, Any] = {
            name: made[name == "end_payload"](count, column.dtype) for name, column in vars(like).items()
        }
        self._filled = 0

    def add(self, columns: dict[str, Any]) -> None:
        """columns: [n] of each name; None for zeros."""
        rows = slice(self._filled, self._filled + len(columns["track"]))
        for name, values in columns.items():
            if values is not None:
                self.columns[name][rows] = values
        self._filled = rows.stop


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


def _renumbered(
    piece: Timeline,
    number: npt.NDArray[np.int32],
    label: npt.NDArray[np.uint64],
    num_tracks: int,
    num_launches: int,
    origin: int,
) -> dict[str, Any]:
    """The columns of its spans."""
    spans = piece.spans
    is_host = piece.events_of(EventClass.HOST)[spans.event]
    payload = spans.begin_payload
    if is_host.any():
        payload = payload.copy()
        payload[is_host] = label[payload[is_host]]
    return {
        "track": spans.track + np.int32(num_tracks),
        "event": number[spans.event],
        "launch": np.where(spans.launch < 0, np.int32(-1), spans.launch + np.int32(num_launches)),
        "start": spans.start - origin,
        "end": np.where(spans.is_open, OPEN_END, spans.end - origin),
        "begin_payload": payload,
        "end_payload": spans.end_payload if any(event.end_fields for event in piece.events) else None,
    }
