"""Chooses where the records of a launch go: straight to shared host memory, or to device memory first.

Host memory is the default sink: it can be read at any moment, outlives a trap and a killed process, and nothing is
copied back. But each store crosses the bus as a separate message, which delays the kernel. Records of a kernel that
stores often go to device memory and are copied when the capture closes. A flight recorder's records in device memory
need a keeper (segment/keeper.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tracekern.errors import BadInput

if TYPE_CHECKING:
    from tracekern.comm.devices.device import Mirror
    from tracekern.segment.writer import SegmentWriter

Sink = Literal["auto", "host", "device"]

MAX_HOST_STORES_PER_S = 10e6
"""Rate up to which a kernel records to host memory: 0.2 to 0.8 ns for each store are at most 0.8 % of its time. The
bundled pipeline, at 273 to 411 M stores a second, takes 6 to 35 % longer with host memory and up to 4 % with device
memory (measured). The limit is six times below the rate that would cost 5 %: a counted launch may last several times
longer than later ones, as it waits for ranks that are not yet in step, so its rate comes out too low."""

MANY_TRACKS, SHORT_S = 1024, 0.01
"""A launch of so many tracks that lasted no longer when it was counted goes to device memory whatever its rate: each
track sends three messages, which take 0.2 to 0.8 ns. For 1,024 tracks these are 2 % of a call of 120 us, and such a
call may have waited milliseconds for other ranks. Pipelines of 2,048 tracks took 38 % longer with host memory at 1
token (measured)."""

STORES_PER_TRACK = 2
"""Stores for a track's header, besides its records."""
STORES_PER_SPAN = {"work": 1, "signal": 1}
"""Stores of a span by class, 2 for all others: they are stored when they begin and completed when they end."""

_log = logging.getLogger("tracekern")


class SinkChoice:
    """Chooses the sink of each kernel by name."""

    def __init__(self, wanted: Sink, has_mirror: bool, together: bool = False) -> None:
        """has_mirror: the device can record into its own memory. together: of a flight recorder: if one kernel does
        so, all do.

        Raises BadInput for a sink that is not available.
        """
        if wanted == "device" and not has_mirror:
            raise BadInput("sink='device': the CPU backend has no memory of its own; take 'auto' or 'host'")
        self._wanted = wanted
        self.has_mirror = has_mirror
        self._together = together
        self._stores_per_s: dict[str, float] = {}

    def count(self, name: str, headers: npt.NDArray[Any], classes: Collection[str], ticks_per_second: float) -> None:
        """Takes in a counted launch of kernel `name`. headers: [num_tracks] TRACK_HEADER. classes: of its events.

        A launch counts its spans, not those of each class: all are taken for the class that stores most often.
        """
        done = headers[headers["end_ticks"] != 0]
        if len(done) == 0:
            return
        ticks = int(done["end_ticks"].max()) - int(done["start_ticks"].min())
        stores_per_span = max((STORES_PER_SPAN.get(event_class, 2) for event_class in classes), default=1)
        stores = int(done["attempted"].sum(dtype=np.int64)) * stores_per_span + STORES_PER_TRACK * len(done)
        is_crowded = len(done) >= MANY_TRACKS and ticks <= SHORT_S * ticks_per_second
        rate = math.inf if is_crowded else stores * ticks_per_second / max(ticks, 1)
        self._stores_per_s[name] = max(rate, self._stores_per_s.get(name, 0.0))

    def open_mirror(self, mirror: Mirror | None, segment: SegmentWriter, directory: Path) -> None:
        """Allocates device memory for records; for a flight recorder, memory that outlives this process."""
        assert mirror is not None  # a sink that needs one is refused without
        reason = mirror.start_keeper(segment) if self._together else mirror.open()
        if reason and self._wanted == "device":
            keep = "last" if self._together else "first"
            raise BadInput(f"keep={keep!r} with sink='device': {reason}; take sink='host'")
        if reason:
            _log.warning("capture %s: records stay in host memory: %s", directory, reason)
            self.has_mirror = False

    def needs_mirror(self) -> bool:
        """Returns whether launches of any kernel counted so far record in device memory."""
        return self._is_mirrored(max(self._stores_per_s.values(), default=0.0))

    def is_mirrored(self, name: str) -> bool:
        """Returns whether launches of this kernel record in device memory.

        A kernel that was never counted does so only with sink="device".
        """
        rate = self._stores_per_s.get(name, 0.0)
        mirrored = self.needs_mirror() if self._together else self._is_mirrored(rate)
        expected = f"{rate / 1e6:.0f} M stores/s expected" if rate else "never counted"
        expected = "thousands of tracks in a short launch" if rate == math.inf else expected
        _log.info("kernel %s: records go to %s memory (%s)", name, "device" if mirrored else "host", expected)
        return mirrored

    def _is_mirrored(self, stores_per_s: float) -> bool:
        dense = self._wanted == "auto" and stores_per_s > MAX_HOST_STORES_PER_S
        return self.has_mirror and (self._wanted == "device" or dense)
