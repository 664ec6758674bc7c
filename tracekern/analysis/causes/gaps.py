"""What of a longer gap before a kernel was surely the host's: the rest may be an unrecorded kernel's."""

from __future__ import annotations

import numpy as np

from tracekern.analysis.causes.history import History, Moments
from tracekern.timeline.model import Int64


def host_part(history: History, moments: Moments, wait: Int64, category: Int64, ns: Int64) -> Int64:
    """[m] ns of each row of what took longer at a wait's source: by how much the least that was the source's host
    exceeds the most that was the waiter's. 0 for categories other than `gap`.

    moments: of all waits the source's release, its `since`, the waiter's begin, its `since`.
    """
    row = np.flatnonzero(category == history.gap)
    _, least, most = (values.reshape(4, -1)[:, wait[row]] for values in history.in_gaps(moments))
    of_host = np.zeros(len(wait), np.int64)
    of_host[row] = np.clip(least[0] - least[1] - most[2] + most[3], 0, ns[row])
    return of_host
