"""How much of the time in which GPUs wait for their hosts is taken by recording the launches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.graph.schedule import Schedule
from tracekern.timeline.model import Timeline

LAUNCH_NS = 3_000
"""Assumed time of a host's thread for recording a launch. It is not measured in the run: `benchmarks/launch.py` found
0.9 to 5 us on the host of an H200."""


@dataclass(frozen=True)
class HostRecording:
    """Gaps between kernels in which the host had not launched the next one yet."""

    num_gaps: int
    total_ns: int
    """Their length together."""

    @property
    def share(self) -> float:
        """Part of that time that recording takes, one launch in each gap."""
        return min(1.0, self.num_gaps * LAUNCH_NS / self.total_ns)


def host_recording(timeline: Timeline, schedule: Schedule) -> HostRecording | None:
    """Returns None where no gap is known to be a host's, and on the CPU backend, whose durations mean nothing."""
    if any(rank.backend == "cpu" for rank in timeline.ranks):
        return None
    which = np.flatnonzero((schedule.host_gap_ns > 0) & (schedule.before >= 0))
    total_ns = int((schedule.start - schedule.gap_start)[which].sum())
    return HostRecording(len(which), total_ns) if total_ns else None
