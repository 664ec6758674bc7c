"""Several Timelines as one: tracks, events, launches and names numbered anew, times from the first event on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracekern.dump.format import MAX_NS
from tracekern.errors import BadInput
from tracekern.timeline.clocks.axis import Times, first_and_last
from tracekern.timeline.model import (
    OPEN_END,
    EventClass,
    EventType,
    Int32,
    Launch,
    Marks,
    Problem,
    Rank,
    Spans,
    Timeline,
    Track,
    UInt64,
)


@dataclass(frozen=True)
class Place:
    """Where the tables of one piece are in those of all."""

    event: Int32
    """[num_events] number of each of its events, those of its lanes behind."""
    label: UInt64
    """[num_host_names]"""
    first_track: int
    first_launch: int
    origin_ns: int

    def spans(self, piece: Timeline) -> dict[str, Any]:
        """[n] columns of spans of the piece, numbered as in the whole; None for zeros."""
        spans = piece.spans
        is_host = piece.events_of(EventClass.HOST)[spans.event]
        payload = spans.begin_payload
        if is_host.any():
            payload = payload.copy()
            payload[is_host] = self.label[payload[is_host]]
        return {
            "track": spans.track + np.int32(self.first_track),
            "event": self.event[spans.event],
            "launch": self._launch(spans.launch),
            "start": spans.start - self.origin_ns,
            "end": np.where(spans.is_open, OPEN_END, spans.end - self.origin_ns),
            "begin_payload": payload,
            "end_payload": spans.end_payload if any(event.end_fields for event in piece.events) else None,
        }

    def marks(self, piece: Timeline) -> dict[str, Any]:
        """[n] columns of marks of the piece."""
        marks = piece.marks
        return {
            "track": marks.track + np.int32(self.first_track),
            "event": self.event[marks.event],
            "launch": self._launch(marks.launch),
            "time": marks.time - self.origin_ns,
            "payload": marks.payload,
        }

    def _launch(self, launch: Int32) -> Int32:
        moved: Int32 = np.where(launch < 0, np.int32(-1), launch + np.int32(self.first_launch))
        return moved


def concatenate(pieces: list[Timeline]) -> Timeline:
    """All ranks in one Timeline, rebased to the first event; without flows. Empties `pieces`.

    Raises BadInput where its times are so far apart that their differences could not be told.
    """
    times = [first_and_last(piece.spans, piece.marks) for piece in pieces]
    return concatenate_at(find_origin(pieces, times), pieces)[0]


def concatenate_at(origin: int, pieces: list[Timeline]) -> tuple[Timeline, list[Place]]:
    """(all ranks in one Timeline, rebased to that time; the place of each in it). Empties `pieces`."""
    tables, places = _join_tables(pieces, origin)
    spans = Filling(Spans(), sum(len(piece.spans) for piece in pieces))
    marks = Filling(Marks(), sum(len(piece.marks) for piece in pieces))
    for place in places:
        piece = pieces.pop(0)  # what is copied is not needed any more
        spans.add(place.spans(piece))
        marks.add(place.marks(piece))
    return tables.replace(spans=Spans(**spans.columns), marks=Marks(**marks.columns)), places


def _join_tables(pieces: Sequence[Timeline], origin: int) -> tuple[Timeline, list[Place]]:
    """(all ranks in one Timeline without spans and marks, the place of each piece in it)"""
    events: dict[EventType, int] = {}
    names: dict[str, int] = {}
    tracks, launches, ranks, problems = list[Track](), list[Launch](), list[Rank](), list[Problem]()
    titles, places = dict[str, None](), list[Place]()
    for piece in pieces:
        number = np.array([events.setdefault(event, len(events)) for event in piece.events] or [0], np.int32)
        label = np.array([names.setdefault(name, len(names)) for name in piece.host_names] or [0], np.uint64)
        places.append(Place(number, label, len(tracks), len(launches), origin))
        moved = (dataclasses.replace(p, track=p.track + len(tracks) if p.track >= 0 else -1) for p in piece.problems)
        problems += list(moved)
        tracks += piece.tracks
        launches += piece.launches
        ranks += piece.ranks
        titles |= {piece.title: None} if piece.title else {}
    tables = Timeline(
        unit="ns",
        ranks=tuple(ranks),
        tracks=tuple(tracks),
        events=tuple(events),
        launches=tuple(launches),
        host_names=tuple(names),
        problems=tuple(problems),
        origin_ns=origin,
        title="; ".join(titles),
        aligned=all(piece.aligned for piece in pieces),
    )
    return tables, places


class Filling:
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


def find_origin(pieces: Sequence[Timeline], times: Sequence[Times | None]) -> int:
    """The time of the first event. times: of each piece, ns.

    Raises BadInput where that of the last is so far from it that the difference could not be told.
    """
    seen = [(*known, piece.ranks[0].rank) for piece, known in zip(pieces, times, strict=True) if known]
    if not seen:
        return 0
    (origin, _, early), (_, last, late) = min(seen), max(seen, key=lambda entry: entry[1])
    if last - origin >= MAX_NS:
        raise BadInput(
            f"rank {late}: an event at {last} ns, and one of rank {early} at {origin} ns: wanted less than 2^62 ns "
            "between them; a dump or a profile is damaged: record again, or leave that rank out"
        )
    return origin
