"""Which arrival ended a wait at a barrier of ranks, and how long each was on its way.

On record is when each rank signalled, and when the wait was over: that the last one's signal ended it is what one
expects. A slow link may have, from a rank that came before.
"""

from __future__ import annotations

import numpy as np

from tracekern.analysis.groups import Groups, group_rows, median_of_groups, quantile_of_groups
from tracekern.analysis.waits.analyze import Waits
from tracekern.timeline.model import Float64, Int64, Mask, Timeline

_SLOW = 2
"""An arrival that takes so many times as long as usual is not what ended the wait, if another one may have been."""
_MIN_WAITS = 4
_STEADIER = 3
"""A link that ends waits takes the same time always; of ranks that came before, the time until the end varies."""


def find_arrivals(timeline: Timeline, waits: Waits) -> tuple[Int64, Int64]:
    """([n] wait, [n] signal span) of arrivals at barriers of ranks, without a warp's own: it lies before its wait."""
    track, arrivals = timeline.spans.track, waits.arrivals
    others = track[arrivals.signal] != track[arrivals.wait]
    return np.searchsorted(waits.row, arrivals.wait[others]), arrivals.signal[others]


def time_arrivals(
    timeline: Timeline, waits: Waits, wait: Int64, signal: Int64, latency: Float64, over: Int64
) -> tuple[Float64, Mask]:
    """([n] how long each arrival was on its way, [n] whether it ended its wait)

    latency: [num_waits] from the last arrival to the end of the wait. over: [num_waits] when each was over. Of those
    that ended no wait it is not on record: what others within, or across, nodes take, or less if there was less time.
    """
    sender = timeline.track_ranks()[timeline.spans.track[signal]]
    near = timeline.on_same_node(sender, waits.rank[wait]).astype(np.int64)
    kinds = group_rows(len(wait), waits.phase[wait], near)
    passed = (over[wait] - timeline.spans.start[signal]).astype(float)
    ended = passed <= latency[wait]
    usual = quantile_of_groups(kinds.group[ended], latency[wait[ended]], len(kinds), 0.25)[kinds.group]
    is_slow = np.zeros(len(waits), bool)
    is_slow[wait[ended & (passed > _SLOW * usual)]] = True
    rows = np.flatnonzero(is_slow[wait])
    links = group_rows(len(rows), waits.phase[wait[rows]], waits.rank[wait[rows]], sender[rows])
    by_link = rows[_steadiest(links, passed[rows])]
    is_by_link = np.zeros(len(waits), bool)
    is_by_link[wait[by_link]] = True
    ended &= ~is_by_link[wait]
    ended[by_link] = True
    others = np.minimum(np.where(np.isfinite(usual), usual, latency[wait]), passed)
    return np.where(ended, passed, others), ended


def _steadiest(links: Groups, passed: Float64) -> Int64:
    """Rows of the one link into a rank, in a phase, that takes the same time in all waits while others vary."""
    middle = median_of_groups(links.group, passed, len(links))
    varies = median_of_groups(links.group, np.abs(passed - middle[links.group]), len(links))
    phase, rank, _ = links.columns
    enough = np.flatnonzero(links.count() >= _MIN_WAITS)
    order = enough[np.lexsort((varies[enough], rank[enough], phase[enough]))]
    is_other = (np.diff(phase[order]) != 0) | (np.diff(rank[order]) != 0)
    is_first = np.append(True, is_other)[: len(order)]
    first = np.flatnonzero(is_first)
    second = np.minimum(first + 1, len(order) - 1)
    has_second = ~is_first[second] if len(order) else np.zeros(0, bool)
    is_it = ~has_second | (varies[order[second]] > _STEADIER * varies[order[first]])
    chosen = np.zeros(len(links), bool)
    chosen[order[first[is_it]]] = True
    return np.flatnonzero(chosen[links.group])
