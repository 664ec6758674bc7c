"""Parses event tables (JSON of csrc/trace/events.h), both from a kernel and from a dump.

What the table of a kernel cannot know is optional, and told by whoever launches it:

    of an event    bytes: how many a span moves or announces; bytes_of: the field that says how many times as many
    of the table   groups: warp groups of a block; group_field: what the number of a group in the grid is called
                   communicator: name, generation and ranks, where the kernel's ranks are some of the run's (Members)
                   settings: facts about the workload, as those of a capture
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tracekern.dump.format import PAYLOAD_BITS, PAYLOAD_LOW_BITS
from tracekern.errors import BadInput
from tracekern.formatting import ranks as name_ranks
from tracekern.formatting import whole_number

EVENT_KEYS = ("name", "class", "ends_at", "channel", "begin_fields", "end_fields")
CLASSES = ("work", "wait", "signal", "sync")
LEVELS = ("1", "2", "3")
CHANNEL_KINDS = ("data", "credit", "count", "barrier", "group", "grid", "immediate")
_INITIAL = "initial="
"""Comes before the number of what a channel of kind credit or count holds before any signal."""
_TAIL = "tail="
"""Comes before the channel of kind count that says what the ring of a channel of kind credit holds."""
_IMMEDIATE_FIELDS = {"signal": ("peer", "imm"), "wait": ("imm", "wanted"), "sync": ("peer", "imm", "number")}
"""What is joined by on channels of kind immediate, by the class of the event."""
_END_BITS = PAYLOAD_BITS - PAYLOAD_LOW_BITS
"""Most bits that the end fields of a wait, signal or sync may have: it is stored when it opens."""


class ChannelRow(NamedTuple):
    """The channel of an event."""

    name: str
    kind: str
    key: tuple[str, ...]
    """Fields."""
    initial: int
    """Level before any signal."""
    tail: str
    """Name of the channel of kind count that says what its ring holds; "" for none."""


class EventRow(NamedTuple):
    """One event of a table."""

    name: str
    event_class: str
    ends_at: str
    channel: ChannelRow | None
    begin_fields: tuple[tuple[str, int], ...]
    """(name, bits) of each field known when the span opens."""
    end_fields: tuple[tuple[str, int], ...]
    """The same of each field known when it closes."""
    level: int = 1
    """Bodies of the kernel with a lower level of detail are compiled without the event."""
    bytes_each: int = 0
    """Bytes that a span moves or announces; 0: the table does not say it."""
    bytes_of: str = ""
    """Field that says how many times as many; "" for once."""


def parse_event(where: str, event: dict[str, Any]) -> EventRow:
    """Parses an event whose entries are all present and text. Raises BadInput naming `where` and the event."""
    where = f"{where}: event {event['name'][:60]!r}"
    if event["class"] not in CLASSES:
        raise BadInput(f"{where}: class {event['class'][:40]!r}, wanted one of {', '.join(CLASSES)}; fix the table")
    if event["ends_at"] not in ("issue", "completion"):
        raise BadInput(f"{where}: ends at {event['ends_at'][:40]!r}, wanted issue or completion; fix the table")
    if (level := event.get("level", "1")) not in LEVELS:
        raise BadInput(f"{where}: level {str(level)[:40]!r}, wanted one of {', '.join(LEVELS)}; fix the table")
    begin_fields = _parse_fields(where, event["begin_fields"])
    end_fields = _parse_fields(where, event["end_fields"])
    names = [name for name, _ in begin_fields + end_fields]
    channel = _parse_channel(where, event["channel"], names) if event["channel"] else None
    if channel and channel.kind == "immediate":
        needs = _IMMEDIATE_FIELDS.get(event["class"], ())
        if not needs or not {*needs} <= {name for name, _ in begin_fields}:
            wanted = "; ".join(
                f"{' '.join(fields)} at the begin of a {kind}" for kind, fields in _IMMEDIATE_FIELDS.items()
            )
            raise BadInput(f"{where}: channel of kind immediate, wanted {wanted}; fix the table")
    bytes_each, bytes_of = event.get("bytes", 0), event.get("bytes_of", "")
    sides = begin_fields, end_fields
    row = EventRow(event["name"], event["class"], event["ends_at"], channel, *sides, int(level), bytes_each, bytes_of)
    _check_bits(where, event, row)
    if type(bytes_each) is not int or not 0 <= bytes_each < 1 << 40 or bytes_of not in ("", *names):
        told = f"bytes {str(bytes_each)[:40]!r} of {str(bytes_of)[:40]!r}"
        raise BadInput(f"{where}: {told}, wanted a whole number, and a field or nothing; fix the table")
    if bytes_each and "bytes" in names:
        raise BadInput(f"{where}: has a field bytes, and bytes {bytes_each} beside its fields; fix the table")
    return row


def parse_groups(where: str, table: dict[str, Any]) -> tuple[int, str]:
    """Returns the warp groups of a block and what their number in the grid is called; (0, "") for none.

    Raises BadInput naming `where`.
    """
    groups, field = table.get("groups", 0), table.get("group_field", "")
    if type(groups) is not int or not 0 <= groups < 1 << 16 or not isinstance(field, str):
        told = f"groups {str(groups)[:40]!r} called {str(field)[:40]!r}"
        raise BadInput(f"{where}: {told}, wanted a whole number below 2^16 and a name; fix the table")
    return groups, field


class Members(NamedTuple):
    """The ranks that a kernel exchanges messages with, where they are not all of the run in their order."""

    name: str
    """Of the group; "" where it has none."""
    generation: int
    """Which of its communicators, from 0 on: a program may make one after the other."""
    ranks: tuple[int, ...]
    """World's rank of each rank of the group: what its kernels call a rank is an index into it."""

    @property
    def label(self) -> str:
        """Its name, or else its ranks."""
        return self.name or name_ranks(self.ranks)


def parse_members(where: str, table: dict[str, Any]) -> Members | None:
    """Returns the members that a table tells of; None for all ranks of the run. Raises BadInput naming `where`."""
    told = table.get("communicator")
    if told is None:
        return None
    if not isinstance(told, dict):
        told = {}
    name, generation, ranks = told.get("name", ""), told.get("generation", 0), told.get("ranks")
    are_ranks = isinstance(ranks, list) and all(type(rank) is int and 0 <= rank < 1 << 15 for rank in ranks)
    is_named = isinstance(name, str) and type(generation) is int
    if not are_ranks or not is_named or not ranks or len({*ranks}) < len(ranks):
        wanted = "a name, a generation and the world's ranks, each once"
        raise BadInput(f"{where}: communicator {str(table['communicator'])[:80]}, wanted {wanted}; fix the table")
    return Members(name, generation, tuple(ranks))


def _parse_fields(where: str, text: str) -> tuple[tuple[str, int], ...]:
    fields = []
    for entry in text.split():
        name, _, bits = entry.partition(":")
        if not name or not bits.isascii() or not bits.isdecimal() or not 1 <= int(bits[:4]) <= PAYLOAD_BITS:
            raise BadInput(
                f"{where}: field {entry[:40]!r}, wanted name:bits with 1..{PAYLOAD_BITS} bits; fix the table"
            )
        fields.append((name, int(bits)))
    return tuple(fields)


def _check_bits(where: str, event: dict[str, Any], row: EventRow) -> None:
    begin, end = event["begin_fields"][:60], event["end_fields"][:60]
    end_bits = sum(bits for _, bits in row.end_fields)
    if sum(bits for _, bits in row.begin_fields) + end_bits > PAYLOAD_BITS:
        need = f"need more than {PAYLOAD_BITS} bits together"
        raise BadInput(f"{where}: begin fields {begin!r} and end fields {end!r} {need}; fix the table")
    if row.event_class != "work" and end_bits > _END_BITS:
        need = f"need more than the {_END_BITS} bits that a {row.event_class} has at its end"
        raise BadInput(f"{where}: end fields {end!r} {need}; fix the table")


def _parse_channel(where: str, text: str, fields: list[str]) -> ChannelRow:
    name, *rest = text.split() or [""]
    kind, key = (rest[0], tuple(rest[1:])) if rest else ("", ())
    if kind not in CHANNEL_KINDS:
        wanted = f"'name {'|'.join(CHANNEL_KINDS)} key-fields'"
        raise BadInput(f"{where}: channel {text[:60]!r}, wanted {wanted}; fix the table")
    initial = 0
    if kind in ("credit", "count") and key and key[0].startswith(_INITIAL):
        number, key = whole_number(key[0].removeprefix(_INITIAL)), key[1:]
        if number is None or number < 0:
            raise BadInput(f"{where}: channel {text[:60]!r}, wanted initial=NUMBER; fix the table")
        initial = number
    tail = ""
    if kind == "credit" and key and key[0].startswith(_TAIL):
        tail, key = key[0].removeprefix(_TAIL), key[1:]
    missing = [field for field in key if field not in fields]
    if missing and missing[0].startswith(_INITIAL):
        raise BadInput(
            f"{where}: channel {text[:60]!r}: initial=NUMBER stands before the key, of credit and count; fix the table"
        )
    if missing:
        raise BadInput(f"{where}: channel key {missing[0][:40]!r} is no field; fix the table")
    return ChannelRow(name, kind, key, initial, tail)
