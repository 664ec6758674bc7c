"""Spans some tracks at a time: what is worked with stays in the cache, and no column is copied whole."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from tracekern.timeline.model import Spans

_SPANS_AT_ONCE = 1 << 16


def parts_by_track(spans: Spans) -> Iterator[tuple[int, Spans]]:
    """(index of the first, spans) of parts that hold all spans of their tracks; together they are `spans`, in order."""
    wanted = spans.track[np.arange(0, len(spans), _SPANS_AT_ONCE)]
    bounds = np.append(np.unique(np.searchsorted(spans.track, wanted)), len(spans)).tolist()
    for start, stop in pairwise(bounds):
        yield start, spans.take(slice(start, stop))
