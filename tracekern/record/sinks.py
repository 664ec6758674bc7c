"""Where the records of a launch go: straight to shared host memory, or to device memory first.

Host memory is the ordinary sink: it can be read at any moment, outlives a trap and a killed process, and nothing is
copied back. The bus carries so many records and no more: a kernel that records faster than that would be slowed down,
so its records go to device memory and are copied when the capture closes.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput

Sink = Literal["auto", "host", "device"]

MAX_HOST_RECORDS_PER_S = 400e6
"""Below this a record costs the same in host memory as in device memory (H200, PCIe 5 x16, 2026-11)."""

_log = logging.getLogger("tracekern")


class SinkChoice:
    """Decides for each kernel by name."""

    def __init__(self, wanted: Sink, has_mirror: bool) -> None:
        """has_mirror: the device can record into memory of its own. Raises BadInput for a sink that cannot be had."""
        if wanted not in ("auto", "host", "device"):
            raise BadInput(f"sink={wanted!r}: wanted 'auto', 'host' or 'device'")
        if wanted == "device" and not has_mirror:
            raise BadInput("sink='device': the CPU backend has no memory of its own; take 'auto' or 'host'")
        self._wanted = wanted
        self._has_mirror = has_mirror
        self._records_per_s: dict[str, float] = {}

    def count(self, name: str, headers: npt.NDArray[Any], ticks_per_second: float) -> None:
        """A launch of kernel `name` was counted; headers: [num_tracks] TRACK_HEADER."""
        done = headers[headers["finished"] != 0]
        if len(done) == 0:
            return
        ticks = int(done["end_ticks"].max()) - int(done["start_ticks"].min())
        rate = int(done["attempted"].sum(dtype=np.int64)) * ticks_per_second / max(ticks, 1)
        self._records_per_s[name] = max(rate, self._records_per_s.get(name, 0.0))

    def is_mirrored(self, name: str) -> bool:
        """Whether launches of this kernel record in device memory. A kernel that was never counted does not."""
        rate = self._records_per_s.get(name, 0.0)
        mirrored = self._has_mirror and (
            self._wanted == "device" or (self._wanted == "auto" and rate > MAX_HOST_RECORDS_PER_S)
        )
        expected = f"{rate / 1e6:.0f} M records/s expected" if rate else "never counted"
        _log.info("kernel %s: records go to %s memory (%s)", name, "device" if mirrored else "host", expected)
        return mirrored
