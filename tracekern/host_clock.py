"""Host time, in which spans, launches and engines of the host are recorded: CLOCK_MONOTONIC plus an anchor.

The anchor puts it beside the wall clock (CLOCK_REALTIME). Setting the wall clock does not move host time, and only
where a capture opens is the anchor taken anew: then host time is wall time until someone sets the clock.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READINGS = 20


@dataclass(frozen=True)
class Anchor:
    """CLOCK_REALTIME less CLOCK_MONOTONIC, within +-doubt_ns."""

    ns: int
    doubt_ns: int

    @classmethod
    def read(cls) -> Anchor:
        """Reads both clocks, some times, of which the fastest counts."""
        stamps = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(_READINGS)]
        before, wall, after = min(stamps, key=lambda row: row[2] - row[0])
        return cls(wall - (before + after) // 2, (after - before) // 2 + 1)


_anchor = Anchor.read()


def anchor() -> Anchor:
    """Returns the anchor that host time has in this process now."""
    return _anchor


def anchor_again() -> Anchor:
    """Takes the anchor anew if the wall clock has been set since, else keeps it. For the opening of a capture."""
    global _anchor
    found = Anchor.read()
    if abs(found.ns - _anchor.ns) > found.doubt_ns + _anchor.doubt_ns:
        _anchor = found
    return _anchor


def host_ns() -> int:
    """Returns host time, now."""
    return time.monotonic_ns() + _anchor.ns


def host_clock_id() -> str:
    """Returns a text that is equal for processes that read the same CLOCK_MONOTONIC; "" if that is not known."""
    time_namespace, machine = Path("/proc/self/ns/time"), machine_id()
    offset = time_namespace.stat().st_ino if time_namespace.exists() else 0
    return f"host {machine} {offset}" if machine else ""


def machine_id() -> str:
    """Returns a text that is equal for processes of one running kernel; "" if that is not known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def describe_host_clock() -> dict[str, Any]:
    """Returns what a dump says of its host times."""
    return {"id": host_clock_id(), "anchor_ns": _anchor.ns}


@dataclass(frozen=True)
class Moment:
    """A time on some host: of two on one clock CLOCK_MONOTONIC says which is later, of others the wall clocks."""

    clock_id: str
    monotonic_ns: int
    wall_ns: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any], host_ns: int) -> Moment:
        """Returns the moment of a host time in a dump. Dumps of older versions have wall clock times."""
        clock = metadata.get("host_time", {})
        return cls(str(clock.get("id", "")), host_ns - int(clock.get("anchor_ns", 0)), host_ns)

    @classmethod
    def of_opening(cls, metadata: Mapping[str, Any]) -> Moment:
        """Returns when the capture of a dump opened, to a millisecond."""
        with contextlib.suppress(ValueError, OverflowError):
            opened = datetime.datetime.fromisoformat(str(metadata.get("created")))
            return cls.of(metadata, round(opened.timestamp() * 1000) * 10**6)
        return cls("", 0, 0)

    def is_before(self, other: Moment, by_ns: int = 0) -> bool:
        """Returns whether this was more than `by_ns` earlier than the other one."""
        is_one_clock = self.clock_id == other.clock_id != ""
        gap = other.monotonic_ns - self.monotonic_ns if is_one_clock else other.wall_ns - self.wall_ns
        return gap > by_ns
