"""Lanes of the host: Python ranges of the capture and torch.profiler's trace, on the axis of the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracekern.dump.reader import Dump
from tracekern.dump.torch_profile import read_profile
from tracekern.timeline.model import Int64


@dataclass(frozen=True)
class HostLane:
    """One thread, or stream by CUPTI: [n] spans in CLOCK_REALTIME ns, sorted by (start, -end)."""

    name: str
    start: Int64
    end: Int64
    labels: tuple[str, ...]


def host_lanes(dump: Dump) -> list[HostLane]:
    """The ranges that `capture.range(...)` recorded, one lane a thread."""
    spans = dump.host_spans()
    lanes = []
    for number, thread in enumerate(dict.fromkeys(spans["thread"].tolist())):
        mine = spans[spans["thread"] == thread]
        labels = [label.decode(errors="replace") for label in mine["name"].tolist()]
        start = mine["start_ns"]
        end = np.maximum(mine["end_ns"], start)  # the wall clock may have been set back meanwhile
        lanes.append(_lane("python" if number == 0 else f"python thread {thread}", start, end, labels))
    return lanes


def torch_lanes(path: Path) -> list[HostLane]:
    """The lanes of a Chrome trace of torch.profiler (.json or .json.gz), one a thread and one a stream of a GPU.

    Raises BadInput when it is not one.
    """
    result = []
    for (_, lane), rows in read_profile(path).items():
        times = np.array([row[:2] for row in rows], np.int64)
        result.append(_lane(lane, times[:, 0], times[:, 1], [row[2] for row in rows]))
    return result


def _lane(name: str, start: Int64, end: Int64, labels: list[str]) -> HostLane:
    order = np.lexsort((-end, start))
    return HostLane(name, start[order], end[order], tuple(labels[idx] for idx in order.tolist()))
