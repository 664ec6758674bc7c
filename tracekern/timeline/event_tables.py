"""Event tables as they stand in a dump (JSON of csrc/trace/events.h) to EventTypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput
from tracekern.record.dump import Dump
from tracekern.record.format import MAX_EVENTS, PAYLOAD_BITS
from tracekern.timeline.model import Channel, ChannelKind, EventClass, EventType, Field, Int32, Problem

_DEVICE_CLASSES = {kind.value: kind for kind in (EventClass.WORK, EventClass.WAIT, EventClass.SIGNAL, EventClass.SYNC)}
_LEVEL_OF_CREDIT = {EventClass.SIGNAL: "value", EventClass.WAIT: "wanted"}
_CHANNEL_KINDS = {kind.value: kind for kind in ChannelKind}


def parse_event_table(where: str, table: dict[str, Any]) -> tuple[EventType, ...]:
    """The events of one table in order. Raises BadInput naming `where` (a dump) and the event."""
    return tuple(_parse_event(f"{where}: event {event['name'][:60]!r}", event) for event in table["events"])


def doubtful_events(rank: int, events: Iterable[EventType]) -> list[Problem]:
    """Warnings for what compiles and does not say what was meant: spans are right, fields or arrows are missing."""
    return [
        Problem("warning", "event_table", rank, -1, f"rank {rank} event {event.name}: {doubt}; fix the table")
        for event in events
        for doubt in _doubts(event)
    ]


def _doubts(event: EventType) -> list[str]:
    names = [field.name for field in (*event.begin_fields, *event.end_fields)]
    doubts = [f"field {name} stands there twice, the first alone is read" for name in names if names.count(name) > 1]
    channel = event.channel
    if channel and event.event_class not in _LEVEL_OF_CREDIT:
        doubts.append(f"channel {channel.name} joins signals and waits, this is class {event.event_class.value}")
    elif channel and channel.kind is ChannelKind.CREDIT:
        level = _LEVEL_OF_CREDIT[event.event_class]
        doubts += [f"credit channel {channel.name} without a field {level}, taken as 0"] if level not in names else []
    return list(dict.fromkeys(doubts))


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

    def number(self, launch: Int32, event: npt.NDArray[np.uint8]) -> Int32:
        """[n] index into types() of the records' own numbers; one that its table does not have becomes a new event."""
        cell = self._table_of_launch[launch] * np.int32(MAX_EVENTS) + event
        flat: Int32 = self._number.ravel()
        for unknown in np.flatnonzero((np.bincount(cell, minlength=len(flat)) > 0) & (flat < 0)).tolist():
            flat[unknown] = self._add(EventType(f"unknown_event_{unknown % MAX_EVENTS}", EventClass.WORK, "completion"))
        number: Int32 = flat[cell]
        return number

    def without_begin(self, number: Int32) -> Int32:
        """[n] the same events as spans whose begin was overwritten: what it told, and whom they meet, is not known.

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


def _parse_event(where: str, event: dict[str, str]) -> EventType:
    if event["class"] not in _DEVICE_CLASSES:
        raise BadInput(
            f"{where}: class {event['class'][:40]!r}, wanted one of {', '.join(_DEVICE_CLASSES)}; fix the table"
        )
    if event["ends_at"] not in ("issue", "completion"):
        raise BadInput(f"{where}: ends at {event['ends_at'][:40]!r}, wanted issue or completion; fix the table")
    begin_fields = _parse_fields(where, event["begin_fields"])
    channel = _parse_channel(where, event["channel"], begin_fields) if event["channel"] else None
    end_fields = _parse_fields(where, event["end_fields"])
    event_class = _DEVICE_CLASSES[event["class"]]
    return EventType(event["name"], event_class, event["ends_at"], channel, begin_fields, end_fields)


def _parse_fields(where: str, text: str) -> tuple[Field, ...]:
    fields = []
    for entry in text.split():
        name, _, bits = entry.partition(":")
        if not name or not bits.isascii() or not bits.isdecimal() or not 1 <= int(bits[:4]) <= PAYLOAD_BITS:
            raise BadInput(
                f"{where}: field {entry[:40]!r}, wanted name:bits with 1..{PAYLOAD_BITS} bits; fix the table"
            )
        fields.append(Field(name, int(bits)))
    if sum(field.bits for field in fields) > PAYLOAD_BITS:
        raise BadInput(f"{where}: fields {text[:60]!r} need more than {PAYLOAD_BITS} bits; fix the table")
    return tuple(fields)


def _parse_channel(where: str, text: str, begin_fields: tuple[Field, ...]) -> Channel:
    name, *rest = text.split() or [""]
    kind, key = (rest[0], tuple(rest[1:])) if rest else ("", ())
    if kind not in _CHANNEL_KINDS:
        raise BadInput(f"{where}: channel {text[:60]!r}, wanted 'name data|credit|barrier key-fields'; fix the table")
    missing = [field for field in key if field not in {known.name for known in begin_fields}]
    if missing:
        raise BadInput(f"{where}: channel key {missing[0][:40]!r} is no begin field; fix the table")
    return Channel(name, _CHANNEL_KINDS[kind], key)
