"""Reads the rings of a keep-last launch: which slots belong to the launch, in which order, and what was overwritten.

A ring may be torn: its writer was killed, or still writes. What a slot holds is told by its own lap and time, so a
record that never arrived, or one that an earlier launch left in the same memory up to 39 hours before, is not taken for
a new one. (In a track that finished, no older one either.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekern.record import format as fmt

_TIME_BITS = fmt.LAP_SHIFT
_LAP_MASK = (1 << (64 - fmt.LAP_SHIFT)) - 1


@dataclass(frozen=True)
class Rings:
    """[num_tracks, num_slots] arrays, oldest record first, and [num_tracks] counts."""

    order: npt.NDArray[np.int64]
    """Slot of the record in the region."""
    kept: npt.NDArray[np.bool_]
    """Whether there is one; the others are empty, torn, or an earlier launch's."""
    ticks: npt.NDArray[np.uint64]
    """Without the lap; right where `kept`."""
    attempted: npt.NDArray[np.int64]
    """Records the writer made."""
    torn: npt.NDArray[np.int64]
    """Slots whose record should be there and is not."""


def ring_slots(records_per_track: int) -> int:
    """Slots of a ring in a region of this many records: the largest power of two in it."""
    return 1 << (records_per_track.bit_length() - 1) if records_per_track else 0


def read_rings(records: npt.NDArray[Any], headers: npt.NDArray[Any]) -> Rings:
    """The rings of some tracks of one launch.

    records: [num_tracks, records_per_track] WIDE_RECORD, at least one a track; headers: [num_tracks] TRACK_HEADER.
    """
    slots = records[:, : ring_slots(records.shape[1])]
    num_slots = slots.shape[1]
    number = np.arange(num_slots)
    lap = (slots["ticks"] >> np.uint64(fmt.LAP_SHIFT)).astype(np.int64)
    start = headers["start_ticks"].astype(np.uint64)[:, None]
    # Sign-extended: what an earlier launch left comes out negative.
    shift = np.uint64(64 - _TIME_BITS)
    since = ((slots["ticks"] - start) << shift).astype(np.int64) >> np.int64(64 - _TIME_BITS)
    finished = headers["end_ticks"] != 0
    longest = np.where(finished, (headers["end_ticks"] - headers["start_ticks"]).astype(np.int64), 1 << _TIME_BITS)
    filled = (slots["word"] & np.uint32(fmt.KIND_MASK) != 0) & (since >= 0) & (since <= longest[:, None])
    newest = np.argmax(np.where(filled, since, -1), axis=1)
    newest_lap = np.take_along_axis(lap, newest[:, None], axis=1)
    this_lap = filled & (lap == newest_lap)
    head = num_slots - np.argmax(this_lap[:, ::-1], axis=1)
    head[~this_lap.any(axis=1)] = 0
    num_laps = np.where(head > 0, newest_lap[:, 0], 0)
    is_older = filled & (lap == (newest_lap - 1) & _LAP_MASK) & (number >= head[:, None])
    has_older = (num_laps > 0) | is_older.any(axis=1)
    kept = this_lap | is_older
    wanted = np.where(has_older, num_slots, head)
    attempted = num_laps * num_slots + head
    order = (head[:, None] + number) % num_slots
    return Rings(
        order=order,
        kept=np.take_along_axis(kept, order, axis=1),
        ticks=np.take_along_axis(start + since.astype(np.uint64), order, axis=1),
        attempted=np.where(finished, headers["attempted"], attempted),
        torn=wanted - kept.sum(axis=1),
    )
