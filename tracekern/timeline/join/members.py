"""Puts the world's ranks where kernels of a part of the ranks named each other by numbers of their group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

import numpy as np

from tracekern.dump.event_table import Members
from tracekern.dump.format import ranks_of
from tracekern.formatting import ranks as name_ranks
from tracekern.timeline.facts.of_launches import once_for_launches
from tracekern.timeline.model import EventType, Field, Int32, Int64, Mask, Problem, Timeline, UInt64, unpack_field

_RANK_FIELDS = "peer", "src_rank"


def name_world_ranks(pieces: Sequence[Timeline]) -> list[Timeline]:
    """The ranks' Timelines with ranks of the world in their fields `peer` and `src_rank`.

    These get as many bits as the largest rank needs.
    """
    bits = bits_of_ranks(pieces)
    return [name_ranks_of(piece, bits) for piece in pieces]


def bits_of_ranks(pieces: Sequence[Timeline]) -> int:
    """What the largest rank needs; 0 where all kernels named the world's ranks."""
    if not any(launch.members for piece in pieces for launch in piece.launches):
        return 0
    bits = max(rank.rank for piece in pieces for rank in piece.ranks).bit_length()
    largest = max(max(launch.members.ranks) for piece in pieces for launch in piece.launches if launch.members)
    return max(bits, largest.bit_length())


def _number_members(timeline: Timeline) -> Int64:
    known: dict[Members | None, int] = {None: 0}
    return np.array([known.setdefault(launch.members, len(known)) for launch in timeline.launches] + [0], np.int64)


number_members = once_for_launches(_number_members)
"""[num_launches + 1] Returns a number for each communicator, 0 for all ranks of the run; the last is of no launch."""


def ranks_beyond(timeline: Timeline, here: Set[int]) -> list[Set[int]]:
    """[num_launches + 1] the ranks of each launch's communicator that are not `here`; the last is of no launch."""
    num_ranks = max((rank.metadata.get("num_ranks", 0) for rank in timeline.ranks), default=0)
    of_all = set(range(num_ranks)) - here
    known = {launch.members: set(launch.members.ranks) - here for launch in timeline.launches if launch.members}
    return [*(known[launch.members] if launch.members else of_all for launch in timeline.launches), of_all]


def exchanging_launches(timeline: Timeline) -> Mask:
    """[num_launches] whether a kernel exchanged messages with other ranks. Adds up over the parts of a run, by |."""
    events = timeline.events
    across = {event.channel for event in events if event.channel and _names_peer(event)}
    meets = np.array([*(_names_peer(event) or event.channel in across for event in events), False], bool)
    found = np.zeros(len(timeline.launches) + 1, bool)
    found[timeline.spans.launch[meets[timeline.spans.event]]] = True
    return found[:-1]


def met_outside(timeline: Timeline, exchanging: Mask | None = None) -> dict[int, str]:
    """Ranks outside the group that captured alone whose messages its kernels may have waited for, and one such kernel.

    Empty for a capture of all ranks. Kernels without messages to other ranks wait for none. exchanging: what
    exchanging_launches() finds in all parts of a run; without, in this one.
    """
    about = next((rank.metadata for rank in timeline.ranks if rank.metadata.get("ranks")), None)
    if about is None:
        return {}
    outside: dict[int, str] = {}
    beyond = ranks_beyond(timeline, set(ranks_of(about)))
    launches = exchanging_launches(timeline) if exchanging is None else exchanging
    for launch in np.flatnonzero(launches).tolist():
        outside |= dict.fromkeys(beyond[launch] - outside.keys(), timeline.launches[launch].name)
    return outside


def lacks_ranks(timeline: Timeline) -> bool:
    """Whether ranks of the capture, or others that its kernels exchange messages with, are not in the timeline."""
    told = (len(ranks_of({"num_ranks": 0} | rank.metadata)) for rank in timeline.ranks)
    return max(told, default=0) > len(timeline.ranks) or bool(met_outside(timeline))


def group_problems(timeline: Timeline, exchanging: Mask | None = None) -> list[Problem]:
    """Says that a group captured alone, and whether its kernels may have waited for ranks outside.

    exchanging: as for met_outside().
    """
    about = timeline.ranks[0].metadata
    members, num_ranks, first = ranks_of(about), about["num_ranks"], timeline.ranks[0].rank
    if len(members) == num_ranks:
        return []
    text = f"the capture is of {name_ranks(members)} of {num_ranks} alone"
    if not (outside := met_outside(timeline, exchanging)):
        return [Problem("note", "group", first, -1, text)]
    others, are = sorted(outside), "is" if len(outside) == 1 else "are"
    text += f"; {name_ranks(others)}, with which {outside[others[0]]} exchanges messages, {are} not in it"
    return [Problem("warning", "outside_rank", first, -1, text, len(others))]


def _names_peer(event: EventType) -> bool:
    return any(field.name in _RANK_FIELDS for field in (*event.begin_fields, *event.end_fields))


def name_ranks_of(piece: Timeline, bits: int) -> Timeline:
    """A rank's Timeline, or a part of it, with ranks of the world. bits: bits_of_ranks()."""
    if not bits:
        return piece
    ranks_of = _RanksOf(piece)
    spans, marks, events = piece.spans, piece.marks, list(piece.events)
    begin, end, payload = spans.begin_payload.copy(), spans.end_payload.copy(), marks.payload.copy()
    for idx, event in enumerate(piece.events):
        if not _names_peer(event):
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
        self._number = _number_members(piece)
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
