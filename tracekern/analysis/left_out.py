"""Which waits kernels left off the record, because the warp had nothing to do before or behind them."""

from __future__ import annotations

from tracekern.timeline.model import Timeline


def left_out(timeline: Timeline) -> list[str]:
    """Events of waits of which a warp that had nothing to do recorded none; of those that had, all are on record."""
    tables = [
        table
        for rank in timeline.ranks
        if rank.metadata.get("detail") == "work"
        for table in rank.metadata["event_tables"]
    ]
    return list(dict.fromkeys(name for table in tables for name in table.get("left_out", [])))
