"""Selects what is recorded of a launch: blocks, roles, events, every Nth launch, and how many records a track gets."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

from tracekern.dump import format as fmt
from tracekern.dump.event_table import EVENT_KEYS, Members, parse_event, parse_groups, parse_members
from tracekern.errors import BadInput

DEFAULT_RECORDS_PER_TRACK = 1024
"""Records per track with "auto" for a name that was never counted."""
DEFAULT_RING_SLOTS = 256
"""The same for a flight recorder. It is smaller: the more launches fit, the further a recorder looks back."""


Detail = Literal["peers", "work", "all"]
"""What a launch records where all events are asked for: those of level 1, which tell who waited for which rank; also
waits for warps of the own block; of these also those of warps with nothing to do."""
_ALL_OF_LEVEL = 1 << 61
"""Part of TraceChoice: all events of its level are selected."""


@dataclass(frozen=True)
class Selection:
    """Selection of a capture. None selects everything."""

    records_per_track: int | Literal["auto"] = "auto"
    blocks: slice | None = None
    roles: tuple[str, ...] | None = None
    events: tuple[str, ...] | None = None
    every: int = 1
    keep: Literal["first", "last"] = "first"
    clock: Literal["realtime", "cycles"] = "realtime"
    detail: Detail = "work"

    def __post_init__(self) -> None:
        if self.keep not in ("first", "last"):
            raise BadInput(f"keep={self.keep!r}: wanted 'first', or 'last' for a flight recorder")
        if self.clock not in ("realtime", "cycles"):
            raise BadInput(f"clock={self.clock!r}: wanted 'realtime', or 'cycles' for spans below a tick of it")
        if self.detail not in get_args(Detail):
            raise BadInput(
                f"detail={self.detail!r}: wanted 'work', 'all' to see how warps with nothing to do wait, or 'peers' to "
                "leave out waits for warps of the own block"
            )
        if self.detail == "peers" and self.events is not None:
            raise BadInput("detail='peers' with events=...: one of them says what is recorded; leave out the other")
        if self.clock == "cycles" and self.keep == "last":
            raise BadInput("clock='cycles' with keep='last': a flight recorder has the realtime clock alone")
        records = self.records_per_track
        if records != "auto" and (not isinstance(records, int) or not 0 <= records < 1 << 31):
            raise BadInput(f"records_per_track={records!r}: wanted 'auto' or a count below 2^31")
        if records == 0 and self.keep == "last":
            raise BadInput("records_per_track=0 with keep='last': a ring keeps 1 record or more; 'auto' gives 256")
        if not isinstance(self.every, int) or self.every < 1:
            raise BadInput(f"every={self.every!r}: wanted 1 or more; 3 records every third launch of a name")
        if not isinstance(self.blocks, slice | None):
            raise BadInput(f"blocks={self.blocks!r}: wanted a slice, as slice(0, 4) for the first four")
        blocks = self.blocks or slice(None)
        for name, value, low in (("start", blocks.start, 0), ("stop", blocks.stop, 0), ("step", blocks.step, 1)):
            if value is not None and (not isinstance(value, Integral) or value < low):
                raise BadInput(f"blocks={self.blocks}: {name} {value!r}, wanted a whole number, {low} or more")

    @property
    def record_format(self) -> str:
        """The format of all records, a key of fmt.RECORD_FORMATS."""
        return "ring" if self.keep == "last" else "cycles" if self.clock == "cycles" else "span"

    def room(self, counted: int | None) -> int:
        """Returns the records of a track in a launch whose fullest track needed `counted`; None: never counted.

        The result is a quarter more than counted, because the number of records of a warp differs from launch to
        launch. A ring has a fixed size, a power of two, whatever the launch needs.
        """
        keeps_last = self.keep == "last"
        if self.records_per_track != "auto":
            wanted = self.records_per_track
        elif keeps_last:
            wanted = DEFAULT_RING_SLOTS
        else:
            wanted = DEFAULT_RECORDS_PER_TRACK if counted is None else counted + math.ceil(counted / 4)
        return 1 << (wanted - 1).bit_length() if keeps_last else wanted

    def pick_blocks(self, num_blocks: int) -> range:
        first, stop, step = (self.blocks or slice(None)).indices(num_blocks)
        # Kernels subtract the first block from the stop, and hold the step in 32 bits.
        return range(first, stop, min(step, num_blocks)) or range(0)

    def event_mask(self, table: KernelTable) -> int:
        if not table.event_names:
            return 0
        finer = table.finer_events if self.detail == "peers" else ()
        return _mask(self.events, table.event_names, fmt.MAX_EVENTS) & ~_mask(finer, table.event_names, fmt.MAX_EVENTS)

    def choice(self, table: KernelTable) -> int:
        """Returns LaunchPlan.choice: the format of the records, and the level of the selected events if not all."""
        selected = self.event_mask(table)
        level = max((level for idx, level in enumerate(table.levels) if selected >> idx & 1), default=1)
        level = level if level < max(table.levels, default=1) else 0
        has_all = _ALL_OF_LEVEL if level and self.detail == "peers" else 0
        return has_all | level << 2 | fmt.RECORD_FORMATS.index(self.record_format)

    def role_mask(self, table: KernelTable) -> int:
        return _mask(self.roles, table.roles, fmt.MAX_ROLES)

    def unknown_names(self, tables: Sequence[KernelTable]) -> list[str]:
        """Returns the selected names that no kernel of the capture has; a misspelt name records nothing."""
        known = {name for table in tables for name in (*table.event_names, *table.roles)}
        return [name for name in (*(self.events or ()), *(self.roles or ())) if name not in known]


@dataclass(frozen=True)
class KernelTable:
    """The event and role tables of a kernel, ready for the segment."""

    event_names: tuple[str, ...]
    levels: tuple[int, ...]
    roles: tuple[str, ...]
    events_json: bytes
    members: Members | None = None

    @classmethod
    def parse(cls, events: str | dict[str, Any], roles: Sequence[str]) -> KernelTable:
        """Parses what describe_events() returned. Raises BadInput for anything else."""
        try:
            table = json.loads(events) if isinstance(events, str) else events
            texts = [table["name"], *(event[key] for event in table["events"] for key in EVENT_KEYS)]
            left_out = table.get("left_out", [])
            texts += left_out if isinstance(left_out, list) else [None]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            texts = [None]
        if not all(isinstance(text, str) for text in texts):
            raise BadInput(f"events={str(events)[:60]!r}: wanted what the kernel's describe_events() returns")
        where = f"event table {table['name'][:60]!r}"
        if not isinstance(table.get("settings", {}), dict):
            raise BadInput(f"{where}: settings {str(table['settings'])[:60]!r}, wanted a dict; fix the table")
        parse_groups(where, table)
        rows = [parse_event(where, event) for event in table["events"]]
        names = tuple(row.name for row in rows)
        if len(names) > fmt.MAX_EVENTS or len(roles) > fmt.MAX_ROLES:
            raise BadInput(
                f"event table with {len(names)} events and {len(roles)} roles: "
                f"wanted at most {fmt.MAX_EVENTS} and {fmt.MAX_ROLES}"
            )
        levels = tuple(row.level for row in rows)
        text, members = json.dumps(table, separators=(",", ":")), parse_members(where, table)
        return cls(names, levels, tuple(roles), text.encode(), members)

    @property
    def finer_events(self) -> tuple[str, ...]:
        """Those of levels above 1."""
        return tuple(name for name, level in zip(self.event_names, self.levels, strict=True) if level > 1)

    @property
    def roles_json(self) -> bytes:
        return json.dumps(self.roles).encode()


def _mask(selected: tuple[str, ...] | None, names: Sequence[str], num_bits: int) -> int:
    if selected is None:
        return (1 << num_bits) - 1
    return sum(1 << idx for idx, name in enumerate(names) if name in selected)
