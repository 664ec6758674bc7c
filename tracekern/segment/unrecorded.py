"""Launches that ran and left no record: why, in the same words in the log, in a dump and for every reader."""

from __future__ import annotations

from typing import Any

from tracekern.formatting import count

_MARGIN_BYTES = 1 << 20
"""For event tables that found no room either."""
_MARGIN_SHARE = 8
"""One part in so many more: in a larger arena more regions are reserved ahead of their launches, and a place before a
multiple of 4 GiB may be left free."""


def why_refused(header: Any, keep: str) -> str:
    """Of a SEGMENT_HEADER: how many launches ran unrecorded, and what they lacked; "" where none did. keep: "first" or
    "last", of a flight recorder, which needs room for a few launches and not for all.
    """
    refused, capacity = int(header["launches_refused"]), int(header["launches_capacity"])
    if not refused:
        return ""
    wanted = int(header["arena_cursor"]) + int(header["refused_bytes"]) + _MARGIN_BYTES
    if int(header["num_launches"]) >= capacity:
        lacked = f"a capture holds {capacity} at most: record some with every=, or keep='last'"
    elif wanted > int(header["arena_bytes"]) and keep == "last":
        max_bytes, each = int(header["arena_bytes"]), int(header["refused_bytes"]) // refused
        lacked = (
            f"a flight recorder uses its regions again, and max_bytes={max_bytes} has room for too few of {each} "
            "bytes: raise it, or lower records_per_track"
        )
    elif wanted > int(header["arena_bytes"]):
        lacked = f"max_bytes={wanted + wanted // _MARGIN_SHARE} would have been enough"
    else:
        lacked = "max_bytes was not used up: /dev/shm was full, or a graph had too few slots"
    return f"{count(refused, 'launch')} ran unrecorded; {lacked}"


def why_only_counted(counted: int) -> str:
    """Says that all launches so far, `counted`, ran inside counting()."""
    return (
        f"nothing is recorded, as all there was, {count(counted, 'launch')}, ran inside counting(); "
        "with records_per_track=256 instead of 'auto' nothing needs to be counted"
    )
