"""Puts the world's ranks where kernels of a part of the ranks named each other by numbers of their group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tracekern.dump.event_table import Members
from tracekern.timeline.model import Field, Int32, Int64, Mask, Timeline, UInt64, unpack_field

_RANK_FIELDS = "peer", "src_rank"


def name_world_ranks(pieces: Sequence[Timeline]) -> list[Timeline]:
    """The ranks' Timelines with ranks of the world in their fields `peer` and `src_rank`.

    These get as many bits as the largest rank needs.
    """
    if not any(launch.members for piece in pieces for launch in piece.launches):
        return list(pieces)
    bits = max(rank.rank for piece in pieces for rank in piece.ranks).bit_length()
    largest = max(max(launch.members.ranks) for piece in pieces for launch in piece.launches if launch.members)
    return [_named(piece, max(bits, largest.bit_length())) for piece in pieces]


def number_members(timeline: Timeline) -> Int64:
    """[num_launches + 1] a number for each communicator, 0 for all ranks of the run; the last is of no launch."""
    known: dict[Members | None, int] = {None: 0}
    return np.array([known.setdefault(launch.members, len(known)) for launch in timeline.launches] + [0], np.int64)


def _named(piece: Timeline, bits: int) -> Timeline:
    ranks_of = _RanksOf(piece)
    spans, marks, events = piece.spans, piece.marks, list(piece.events)
    begin, end, payload = spans.begin_payload.copy(), spans.end_payload.copy(), marks.payload.copy()
    for idx, event in enumerate(piece.events):
        if not any(field.name in _RANK_FIELDS for field in (*event.begin_fields, *event.end_fields)):
            continue
        of_spans, of_marks = spans.event == idx, marks.event == idx
        for name in _RANK_FIELDS:
            told = events[idx]
            begin_fields = _widened(told.begin_fields, name, bits)
            end_fields = _widened(told.end_fields, name, bits)
            for fields, wide, rows, packed, launch in (
                (told.begin_fields, begin_fields, of_spans, begin, spans.launch),
                (told.end_fields, end_fields, of_spans, end, spans.launch),
                (told.begin_fields, begin_fields, of_marks, payload, marks.launch),
            ):
                _rewrite(packed, rows, fields, wide, name, ranks_of, launch)
            events[idx] = dataclasses.replace(told, begin_fields=begin_fields, end_fields=end_fields)
    return piece.replace(
        events=tuple(events),
        spans=dataclasses.replace(spans, begin_payload=begin, end_payload=end),
        marks=dataclasses.replace(marks, payload=payload),
    )


class _RanksOf:
    """World's ranks by launch and number in its group."""

    def __init__(self, piece: Timeline) -> None:
        self._number = number_members(piece)
        known = [launch.members for launch in piece.launches if launch.members]
        width = 1 + max((len(members.ranks) for members in known), default=0)
        self._table = np.full((int(self._number.max()) + 1, width), -1, np.int64)
        for number, launch in zip(self._number.tolist(), piece.launches, strict=False):
            if launch.members:
                self._table[number, : len(launch.members.ranks)] = launch.members.ranks

    def world(self, launch: Int32, rank: Int64) -> Int64:
        """[n] rank: [n] in the group of the launch. What is no rank of the group stays as it is."""
        number, place = self._number[launch], np.minimum(rank, self._table.shape[1] - 1)
        found = self._table[number, place]
        return np.where((number > 0) & (found >= 0), found, rank)


def _widened(fields: tuple[Field, ...], name: str, bits: int) -> tuple[Field, ...]:
    return tuple(
        dataclasses.replace(field, bits=max(field.bits, bits)) if field.name == name else field for field in fields
    )


def _rewrite(
    packed: UInt64,
    rows: Mask,
    fields: tuple[Field, ...],
    wide: tuple[Field, ...],
    name: str,
    ranks_of: _RanksOf,
    launch: Int32,
) -> None:
    names = [field.name for field in fields]
    if name not in names or not rows.any():
        return
    place = names.index(name)
    shift, old, new = sum(field.bits for field in fields[:place]), fields[place].bits, wide[place].bits
    payload = packed[rows]
    rank = ranks_of.world(launch[rows], unpack_field(fields, name, payload)).astype(np.uint64)
    low = payload & np.uint64((1 << shift) - 1)
    above = payload >> np.uint64(shift + old)
    packed[rows] = low | rank << np.uint64(shift) | above << np.uint64(shift + new)
