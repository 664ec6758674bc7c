"""Describes a launch before its kernel starts, and the region it records to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tracekern.dump import format as fmt


@dataclass(frozen=True)
class LaunchPlan:
    """One launch as the host knows it before the kernel starts."""

    name: str
    num_blocks: int
    warps_per_block: int
    records_per_track: int
    """0: count only."""
    stream: int = 0
    sequence: int = 0
    epoch: int = 0
    blocks: range = range(0)
    """Blocks that are recorded; one track per block and warp."""
    event_mask: int = (1 << 64) - 1
    role_mask: int = (1 << 32) - 1
    events: bytes = b""
    """The kernel's event table, JSON as describe_events() gives it."""
    roles: bytes = b"[]"
    """JSON list of role names."""
    key: str = ""
    """What the program calls this launch. In a graph only; others get theirs when they start."""
    flags: int = 0
    """ENTRY_* of tracekern.dump.format."""
    choice: int = 0
    """What TraceChoice (csrc/trace/trace_choice.h) wants added to the address of a descriptor."""

    @cached_property
    def descriptor(self) -> bytes:
        """Bytes of a LAUNCH_DESCRIPTOR without the addresses of headers and records."""
        num_blocks = self.num_blocks if self.num_tracks else 0
        return _row(fmt.LAUNCH_DESCRIPTOR, {**self._selection, "num_blocks": num_blocks})

    @cached_property
    def entry(self) -> bytes:
        """Bytes of a LAUNCH_ENTRY without offsets, for a region that no launch has yet."""
        only_host_knows = {
            "name": fmt.cut_name(self.name),
            "key": fmt.cut_name(self.key),
            "epoch": self.epoch & 0xFFFFFFFF,
            "sequence": self.sequence,
            "stream": self.stream,
            "num_blocks": self.num_blocks,
            "num_tracks": self.num_tracks,
            "flags": self.flags | fmt.ENTRY_RESERVED,
            "events_bytes": len(self.events),
            "roles_bytes": len(self.roles),
        }
        return _row(fmt.LAUNCH_ENTRY, {**self._selection, **only_host_knows})

    @property
    def _selection(self) -> dict[str, Any]:
        """Fields that descriptor and entry have in common."""
        return {
            "warps_per_block": self.warps_per_block,
            "block_first": self.blocks.start,
            "block_stop": self.blocks.stop,
            "block_step": self.blocks.step,
            "records_per_track": self.records_per_track,
            "role_mask": self.role_mask,
            "event_mask": self.event_mask,
        }

    @cached_property
    def num_tracks(self) -> int:
        return len(self.blocks) * self.warps_per_block

    @cached_property
    def region_bytes(self) -> int:
        """Arena bytes of descriptor, headers and records."""
        headers = self.num_tracks * fmt.TRACK_HEADER.itemsize
        records = self.num_tracks * self.records_per_track * fmt.RECORD_BYTES
        return fmt.LAUNCH_DESCRIPTOR.itemsize + headers + fmt.align_up(records)


class Region(NamedTuple):
    """Where a launch records: descriptor, headers and records, one behind the other."""

    launch_idx: int
    offset: int
    """From the segment's start."""
    headers: int
    records: int
    """Addresses that kernels write to, as the descriptor has them."""


def _row(dtype: np.dtype[Any], values: dict[str, Any]) -> bytes:
    row = np.zeros(1, dtype)
    for field, value in values.items():
        row[field] = value
    return row.tobytes()
