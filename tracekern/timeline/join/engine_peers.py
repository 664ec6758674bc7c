"""Puts ranks where the engines of a capture named their peers by numbers of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tracekern.timeline.model import Field, Int64, Marks, Spans, Timeline, Track, TrackKind, UInt64, unpack_field

NO_RANK = (1 << 10) - 1
"""A peer that is not in the capture; field `peer` has 10 bits."""
_ENGINE, _PEER = "engine", "peer"

Introduced = dict[tuple[int, int], dict[int, int]]
"""Engine, by its rank and its number there -> the number of each of its peers -> the peer's rank."""


def name_peers(timeline: Timeline) -> Timeline:
    """The timeline with ranks in the fields `peer` of its engines' spans and marks.

    Marks `engine` say which engine a rank has, marks `peer` which engine a number stands for.
    """
    if not timeline.tracks_of(TrackKind.ENGINE).any():
        return timeline
    found = introduced([timeline])
    spans, marks = timeline.spans, timeline.marks
    return timeline.replace(
        spans=dataclasses.replace(spans, begin_payload=_named(timeline, found, spans, spans.begin_payload)),
        marks=dataclasses.replace(marks, payload=_named(timeline, found, marks, marks.payload)),
    )


def peer_of(found: Introduced, track: Track, number: int) -> int:
    """The rank that an engine calls by this number. found: introduced(); track: of the engine."""
    return found.get(_of(track), {}).get(number, NO_RANK)


def _of(track: Track) -> tuple[int, int]:
    """Rank, and which of its engines."""
    return track.rank, track.stream


def introduced(timelines: Sequence[Timeline]) -> Introduced:
    """What all ranks of a capture say of their engines, in one Timeline or one for each."""
    rank_of_engine: dict[int, int] = {}
    peers: list[tuple[tuple[int, int], int, int]] = []
    for timeline in timelines:
        marks = timeline.marks
        for idx, event in enumerate(timeline.events):
            if event.name not in (_ENGINE, _PEER) or not event.has(_ENGINE):
                continue
            rows = np.flatnonzero(marks.event == idx)
            engines = unpack_field(event.begin_fields, _ENGINE, marks.payload[rows]).tolist()
            tracks = [timeline.tracks[track] for track in marks.track[rows].tolist()]
            if event.name == _ENGINE:
                rank_of_engine |= {engine: track.rank for engine, track in zip(engines, tracks, strict=True)}
            else:
                numbers = unpack_field(event.begin_fields, _PEER, marks.payload[rows]).tolist()
                peers += [(_of(track), *pair) for track, *pair in zip(tracks, numbers, engines, strict=True)]
    found: Introduced = {}
    for own, number, engine in peers:
        found.setdefault(own, {})[number] = rank_of_engine.get(engine, NO_RANK)
    return found


def _named(timeline: Timeline, found: Introduced, rows: Spans | Marks, payload: UInt64) -> UInt64:
    """[n] payloads of spans or marks with ranks as peers."""
    named: UInt64 = payload.copy()
    track, event = rows.track, rows.event
    is_engine = timeline.tracks_of(TrackKind.ENGINE)
    for idx, about in enumerate(timeline.events):
        mine = np.flatnonzero((event == idx) & is_engine[track]) if about.has(_PEER) else np.empty(0, np.int64)
        if not len(mine):
            continue
        shift = _shift(about.begin_fields)
        numbers = unpack_field(about.begin_fields, _PEER, payload[mine])
        ranks = np.full(len(mine), NO_RANK, np.int64)
        for of_track in np.unique(track[mine]).tolist():
            of_engine = found.get(_of(timeline.tracks[of_track]), {})
            here = track[mine] == of_track
            ranks[here] = _look_up(of_engine, numbers[here])
        # The numbers are in place already: only what differs is changed.
        named[mine] ^= (numbers ^ ranks).astype(np.uint64) << np.uint64(shift)
    return named


def _look_up(ranks: dict[int, int], numbers: Int64) -> Int64:
    table = np.full(NO_RANK + 1, NO_RANK, np.int64)
    table[list(ranks)] = list(ranks.values())
    ranks_of: Int64 = table[numbers]
    return ranks_of


def _shift(fields: tuple[Field, ...]) -> int:
    names = [field.name for field in fields]
    return sum(field.bits for field in fields[: names.index(_PEER)])
