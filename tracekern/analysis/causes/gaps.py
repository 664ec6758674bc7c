"""What of a charge for a longer gap before a kernel was surely the host's: the rest may be an unrecorded kernel's."""

from __future__ import annotations

import numpy as np

from tracekern.analysis.causes.history import History, Moments
from tracekern.timeline.model import Float64, Int64


def divide_gaps(
    history: History, moments: Moments, wait: Int64, category: Int64, share: Float64
) -> tuple[Int64, Int64, Float64]:
    """The columns, with each row of category `gap` as two: `gap` for the host's part, `gap + 1` for the rest.

    moments: of all waits the source's release, its `since`, the waiter's begin, its `since`. The host's part is by how
    much the least that was the source's host exceeds the most that was the waiter's.
    """
    row = np.flatnonzero(category == history.gap)
    gaps, least, most = (values.reshape(4, -1)[:, wait[row]] for values in history.in_gaps(moments))
    excess = np.maximum(gaps[0] - gaps[1] - gaps[2] + gaps[3], 1)
    of_host = np.clip(least[0] - least[1] - most[2] + most[3], 0, excess) / excess
    kept = share.copy()
    kept[row] *= of_host
    some = row[of_host < 1]
    rest = share[some] - kept[some]
    wait, category = np.append(wait, wait[some]), np.append(category, category[some] + 1)
    order = np.argsort(wait, kind="stable")
    return wait[order], category[order], np.append(kept, rest)[order]
