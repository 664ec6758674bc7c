"""Reads the event tables of a dump (JSON of csrc/trace/events.h) into EventTypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump.event_table import EventRow, Members, parse_event, parse_groups, parse_members
from tracekern.dump.format import MAX_EVENTS, PAYLOAD_BITS
from tracekern.dump.reader import Dump
from tracekern.errors import BadInput
from tracekern.timeline.model import Channel, ChannelKind, EventClass, EventType, Field, Int32, Problem, UInt64

_LEVEL = {EventClass.SIGNAL: "value", EventClass.WAIT: "wanted"}


def parse_event_table(where: str, table: dict[str, Any]) -> tuple[EventType, ...]:
    """The events of one table in order. Raises BadInput naming `where` (a dump) and the event."""
    return tuple(_event_type(parse_event(where, event)) for event in table["events"])


def doubtful_events(rank: int, events: Iterable[EventType]) -> list[Problem]:
    """Warnings for what compiles and does not say what was meant: spans are right, fields or arrows are missing."""
    return [
        Problem("warning", "event_table", rank, -1, f"rank {rank} event {event.name}: {doubt}; fix the table")
        for event in events
        for doubt in _doubts(event)
    ]


def _doubts(event: EventType) -> list[str]:
    sides = [[field.name for field in fields] for fields in (event.begin_fields, event.end_fields)]
    names = [*sides[0], *sides[1]]
    doubts = [
        f"field {name} is there twice, only the first is read"
        for side in sides
        for name in side
        if side.count(name) > 1
    ]
    channel = event.channel
    is_arrival = channel is not None and channel.kind is ChannelKind.IMMEDIATE and event.event_class is EventClass.SYNC
    if channel and event.event_class not in _LEVEL and not is_arrival:
        doubts.append(f"channel {channel.name} joins signals and waits, this is class {event.event_class.value}")
    elif channel and channel.kind.is_local and event.event_class is EventClass.SIGNAL:
        doubts.append(f"at channel {channel.name} warps wait for each other, nobody signals")
    elif channel and channel.kind.has_levels and (level := _LEVEL[event.event_class]) not in names:
        doubts.append(f"{channel.kind.value} channel {channel.name} without a field {level}, taken as 0")
    return list(dict.fromkeys(doubts))


def groups_of_launches(dump: Dump) -> list[tuple[int, str]]:
    """The warp groups of a block of each launch, and what their number in the grid is called; (0, "") for none.

    Raises BadInput for a bad table.
    """
    of_table = [
        parse_groups(f"{dump.path}: event table {table['name'][:60]!r}", table)
        for table in dump.metadata["event_tables"]
    ]
    found = [of_table[launch.event_table] for launch in dump.launches]
    return [
        groups if groups[0] and launch.warps_per_block % groups[0] == 0 else (0, "")
        for groups, launch in zip(found, dump.launches, strict=True)
    ]


def members_of_launches(dump: Dump) -> list[Members | None]:
    """The members of each launch's communicator; None for all ranks. Raises BadInput for a bad table."""
    of_table = [
        parse_members(f"{dump.path}: event table {table['name'][:60]!r}", table)
        for table in dump.metadata["event_tables"]
    ]
    beyond = [members for members in of_table if members and max(members.ranks) >= dump.metadata["num_ranks"]]
    if beyond:
        told = f"communicator of ranks {beyond[0].ranks}, and the run has {dump.metadata['num_ranks']}"
        raise BadInput(f"{dump.path}: {told}; fix the table")
    return [of_table[launch.event_table] for launch in dump.launches]


class EventNumbers:
    """Numbers the events of all tables of a dump, each event once. Raises BadInput for a bad table."""

    def __init__(self, dump: Dump) -> None:
        self._known: dict[EventType, int] = {}
        tables = dump.metadata["event_tables"]
        self._number = np.full((max(1, len(tables)), MAX_EVENTS), -1, np.int32)
        for idx, table in enumerate(tables):
            for row, event in enumerate(parse_event_table(str(dump.path), table)):
                self._number[idx, row] = self._add(event)
        self._table_of_launch = np.array([launch.event_table for launch in dump.launches], np.int32)
        self._unknown: dict[int, int] = {}

    def number(self, launch: Int32, event: npt.NDArray[np.uint8]) -> Int32:
        """[n] index into types() of the records' own numbers; one that its table does not have becomes a new event."""
        cell = self._table_of_launch[launch] * np.int32(MAX_EVENTS) + event
        flat: Int32 = self._number.ravel()
        for unknown in np.flatnonzero((np.bincount(cell, minlength=len(flat)) > 0) & (flat < 0)).tolist():
            self._unknown[unknown] = int(launch[np.argmax(cell == unknown)])
            flat[unknown] = self._add(EventType(f"unknown_event_{unknown % MAX_EVENTS}", EventClass.WORK, "completion"))
        number: Int32 = flat[cell]
        return number

    def split(self, number: Int32, payload: UInt64) -> tuple[UInt64, UInt64]:
        """[n] begin and end payloads of [n] payloads of span records: begin fields are lowest, end fields highest."""
        types = self.types()
        bits = [(_bits(event.begin_fields), _bits(event.end_fields)) for event in types]
        mask = np.array([(1 << begin) - 1 for begin, _ in bits], np.uint64)
        shift = np.array([PAYLOAD_BITS - end for _, end in bits], np.uint64)
        return payload & mask[number], payload >> shift[number]

    def unknown(self, dump: Dump) -> list[Problem]:
        """An error for each event that a table does not have: its name, class and fields are not known."""
        problems = []
        for cell, launch in sorted(self._unknown.items()):
            table, event = divmod(cell, MAX_EVENTS)
            num_events = len(dump.metadata["event_tables"][table]["events"])
            text = (
                f"rank {dump.rank}: {dump.launches[launch].name} recorded event {event}, its table has {num_events}, "
                "from 0 on: pass what the kernel's own describe_events() returns"
            )
            problems.append(Problem("error", "unknown_event", dump.rank, -1, text))
        return problems

    def without_begin(self, number: Int32) -> Int32:
        """[n] the same events as spans whose begin was overwritten: its fields, and what they join, are not known.

        Their begin payload is 1: a picture says why they begin where they do.
        """
        types = self.types()
        for known in np.unique(number).tolist():
            headless = dataclasses.replace(
                types[known], channel=None, begin_fields=(Field("begin_overwritten", 1),), is_headless=True
            )
            number = np.where(number == known, np.int32(self._add(headless)), number)
        return number

    def types(self) -> tuple[EventType, ...]:
        return tuple(self._known)

    def _add(self, event: EventType) -> int:
        return self._known.setdefault(event, len(self._known))


def _bits(fields: tuple[Field, ...]) -> int:
    return sum(field.bits for field in fields)


def _event_type(row: EventRow) -> EventType:
    channel = None
    if row.channel:
        channel = Channel(**row.channel._asdict() | {"kind": ChannelKind(row.channel.kind)})
    begin_fields, end_fields = (tuple(Field(*field) for field in side) for side in (row.begin_fields, row.end_fields))
    return EventType(
        row.name,
        EventClass(row.event_class),
        row.ends_at,
        channel,
        begin_fields,
        end_fields,
        bytes_each=row.bytes_each,
        bytes_of=row.bytes_of,
    )
