"""Where the parts of a segment stand, and how many entries each has room for."""

from __future__ import annotations

import mmap

from tracekern.record import format as fmt
from tracekern.record.fault import FAULT_RECORD

MAX_LAUNCHES = 1 << 16
MAX_CLOCK_SAMPLES = 1 << 16


def segment_layout(metadata_bytes: int, host_spans: int, arena_bytes: int) -> dict[str, int]:
    """Header fields: where each part of the segment stands."""
    page = mmap.PAGESIZE
    layout = {"metadata_offset": fmt.SEGMENT_HEADER.itemsize, "metadata_bytes": metadata_bytes}
    cursor = layout["metadata_offset"] + metadata_bytes
    parts = (
        ("launches", MAX_LAUNCHES, fmt.LAUNCH_ENTRY),
        ("samples", MAX_CLOCK_SAMPLES, fmt.CLOCK_SAMPLE),
        ("host", host_spans, fmt.HOST_SPAN),
    )
    for part, capacity, dtype in parts:
        cursor = fmt.align_up(cursor, page)
        layout |= {f"{part}_offset": cursor, f"{part}_capacity": capacity}
        cursor += capacity * dtype.itemsize
    arena_offset = fmt.align_up(cursor, page)
    arena_bytes = fmt.align_up(arena_bytes, page)
    return layout | {
        "arena_offset": arena_offset,
        "arena_bytes": arena_bytes,
        "arena_cursor": FAULT_RECORD.itemsize,
        "fault_offset": arena_offset,
        "total_bytes": arena_offset + arena_bytes,
    }
