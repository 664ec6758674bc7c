"""What the host knows of a launch before its kernel starts, and where it records."""

from __future__ import annotations

from dataclasses import dataclass

from tracekern.record import format as fmt


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
    flags: int = 0
    """ENTRY_* of tracekern.record.format."""

    def descriptor_fields(self) -> dict[str, int]:
        """What a LaunchDescriptor and a LaunchEntry of this plan have in common."""
        return {
            "num_blocks": self.num_blocks if self.num_tracks else 0,
            "warps_per_block": self.warps_per_block,
            "block_first": self.blocks.start,
            "block_stop": self.blocks.stop,
            "block_step": self.blocks.step,
            "records_per_track": self.records_per_track,
            "role_mask": self.role_mask,
            "event_mask": self.event_mask,
        }

    @property
    def num_tracks(self) -> int:
        return len(self.blocks) * self.warps_per_block

    @property
    def region_bytes(self) -> int:
        """Arena bytes of descriptor, headers and records."""
        headers = self.num_tracks * fmt.TRACK_HEADER.itemsize
        records = self.num_tracks * self.records_per_track * fmt.WIDE_RECORD.itemsize
        return fmt.LAUNCH_DESCRIPTOR.itemsize + headers + fmt.align_up(records)


@dataclass(frozen=True)
class Region:
    """Where a launch records: descriptor, headers and records, one behind the other."""

    launch_idx: int
    offset: int
    """From the segment's start."""
