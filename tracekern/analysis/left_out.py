"""Which waits kernels left off the record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tracekern.timeline.model import Timeline


def idle_waits(timeline: Timeline) -> list[str]:
    """Events of waits that no warp with nothing to do before or behind them recorded; those of others are on record."""
    return _distinct(name for table in _tables(timeline, "work") for name in table.get("left_out", []))


def block_waits(timeline: Timeline) -> list[str]:
    """Events above level 1 of captures with detail "peers": waits for warps of the own rank, none of them on record."""
    events = (event for table in _tables(timeline, "peers") for event in table["events"])
    return _distinct(event["name"] for event in events if event.get("level", "1") != "1")


def left_out(timeline: Timeline) -> str:
    """Says what was left out; "" for nothing."""
    parts = (idle_waits(timeline), "of warps with nothing to do"), (block_waits(timeline), "of all warps")
    return ", ".join(f"{', '.join(names)} {whose}" for names, whose in parts if names)


def _tables(timeline: Timeline, detail: str) -> Iterator[dict[str, Any]]:
    """Event tables of the ranks that recorded in this detail."""
    for rank in timeline.ranks:
        if rank.metadata.get("detail") == detail:
            yield from rank.metadata["event_tables"]


def _distinct(names: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(names))
