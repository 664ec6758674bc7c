"""Explains why launches ran unrecorded, in the same words in the log, in a dump and for every reader."""

from __future__ import annotations

from typing import Any

from tracekern.formatting import count

_MARGIN_BYTES = 1 << 20
"""Bytes added for event tables that found no room either."""
_MARGIN_SHARE = 8
"""One part in this many is added: a larger arena reserves more regions ahead of their launches, and may leave a gap
before a multiple of 4 GiB."""


def why_refused(header: Any, keep: str) -> str:
    """Returns how many launches ran unrecorded and what they lacked; "" if none did.

    header: a SEGMENT_HEADER. keep: "first", or "last" for a flight recorder, which needs room for a few launches only.
    """
    refused, capacity = int(header["launches_refused"]), int(header["launches_capacity"])
    if not refused:
        return ""
    if int(header["failed"]):
        return f"{count(refused, 'launch')} ran unrecorded; recording had failed: that run's warning says why"
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
        lacked = (
            "max_bytes was not used up: /dev/shm was full (make a container's larger: docker run --shm-size=1g), or "
            "a graph had too few slots"
        )
    return f"{count(refused, 'launch')} ran unrecorded; {lacked}"


def why_only_counted(counted: int) -> str:
    """Returns the text for a capture whose `counted` launches all ran inside counting()."""
    return (
        f"nothing is recorded: all launches so far ({counted}) ran inside counting(); "
        "with records_per_track=256 instead of 'auto' nothing needs to be counted"
    )
