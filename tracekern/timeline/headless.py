"""Spans that a flight recorder may show too short: their begin was overwritten."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracekern.timeline.model import Timeline


def maybe_headless(timeline: Timeline) -> npt.NDArray[np.bool_]:
    """[num_spans] whether the begin of a span may be gone: it is shown from the oldest record of its track on."""
    spans = timeline.spans
    has_overwritten = np.array([*(launch.records_overwritten > 0 for launch in timeline.launches), False], bool)
    found: npt.NDArray[np.bool_] = has_overwritten[spans.launch]
    if found.any():
        is_first = np.append(True, (np.diff(spans.track) != 0) | (np.diff(spans.launch) != 0))
        found &= spans.start == spans.start[is_first][np.cumsum(is_first) - 1]
    return found
