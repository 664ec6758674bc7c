"""Launches for which with_recorder() had no body with all that was asked for, in words for the log and a dump."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.dump import format as fmt
from tracekern.formatting import count
from tracekern.segment.view import SegmentView

_CAPTURE_WITHOUT = {
    "span": "",
    "ring": ', or capture without keep="last"',
    "cycles": ', or capture without clock="cycles"',
}


def lacking_bodies(segment: SegmentView) -> list[dict[str, Any]]:
    """Returns name, number of launches and text, for each kernel and body that its list lacks."""
    entries, told = _told(segment)
    kinds: dict[tuple[bytes, int, int, int], list[int]] = {}  # most launches of a kernel are alike
    for idx, key in enumerate(zip(entries["name"], entries["events_offset"], entries["event_mask"], told, strict=True)):
        kinds.setdefault(key, []).append(idx)
    found: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for (name, _, _, of_kind), launches in kinds.items():
        level = int(of_kind) & (1 << fmt.LACKED_FORMAT_SHIFT) - 1
        events = _selected_above(segment, entries[launches[0]], level) if level else ()
        if events or not level:
            record_format = fmt.RECORD_FORMATS[(int(of_kind) ^ fmt.LACKS_BODY) >> fmt.LACKED_FORMAT_SHIFT]
            found[name.decode(errors="replace"), record_format, events] += len(launches)
    return [
        {"name": name, "launches": launches, "text": _text(name, record_format, events, launches)}
        for (name, record_format, events), launches in found.items()
    ]


def _told(segment: SegmentView) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint32]]:
    """Returns the LAUNCH_ENTRYs of launches that lacked a body, and what their descriptors tell of it."""
    entries = segment.launches()
    not_launched = fmt.ENTRY_COUNTED_ONLY | fmt.ENTRY_RESERVED | fmt.ENTRY_IN_GRAPH  # in graphs it numbers the replay
    entries = entries[entries["flags"] & not_launched == 0]
    words = np.frombuffer(segment.words, np.uint32)
    at = entries["headers_offset"] // 4 - 1  # the last word of the descriptor in front of the headers
    entries, at = entries[at < len(words)], at[at < len(words)]  # it may be damaged
    told = words[at]
    formats = (told ^ fmt.LACKS_BODY) >> fmt.LACKED_FORMAT_SHIFT
    lacks = (told & fmt.LACKS_BODY != 0) & (formats < len(fmt.RECORD_FORMATS))
    return entries[lacks], told[lacks]


def _selected_above(segment: SegmentView, entry: Any, level: int) -> tuple[str, ...]:
    """Returns the events of higher levels that were asked for by name: what a build leaves out it may mean to."""
    selected = int(entry["event_mask"])
    if selected == (1 << fmt.MAX_EVENTS) - 1:
        return ()
    events = segment.events(entry)["events"]
    return tuple(
        event["name"]
        for bit, event in enumerate(events)
        if selected >> bit & 1 and int(event.get("level", "1")) > level
    )


def _text(name: str, record_format: str, events: tuple[str, ...], launches: int) -> str:
    body = f"Recorder<true, tracekern::RecordFormat::{record_format}>"
    ran = f"{count(launches, 'launch')} of {name}"
    if events:
        return (
            f"{ran} recorded nothing of {', '.join(events)}: no body in the list of its with_recorder<...>() has "
            f"their level; add {body}"
        )
    return (
        f"{ran} ran untraced: the list of its with_recorder<...>() lacks {body}; add it"
        + (_CAPTURE_WITHOUT[record_format])
    )
