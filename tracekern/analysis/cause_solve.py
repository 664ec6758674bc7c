"""What each wait costs with everything that it caused: a sparse triangular system over the waits, latest first.

A wait k passes x_k * s_k on to the waits of its source in a range of time, in proportion to their lateness w_j. With
the density d_k = x_k * s_k / (sum of w over the range), a wait receives w_j times the sum of the densities of all
ranges that it lies in. That sum changes only where ranges begin or end, so along a run (and along the history of a
stream) each unknown is its later neighbour's plus the ranges that end here, minus those that began behind it: a few
entries a row, however long the ranges are.
"""

from __future__ import annotations

import numpy as np

from tracekern.analysis.cause_shares import Ranges, Sequence, Shares
from tracekern.timeline.model import Float64, Int64


def solve_costs(shares: Shares, late_ns: Float64) -> Float64:
    """[n, m] ns of waiting that each late wait stands for: its own lateness and what was passed on to it.

    late_ns: [n, m] its own lateness, in m cases that are split alike.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.linalg import spsolve_triangular

    sequence, ranges, weight = shares.late_waits, shares.late_ranges, shares.late_ns
    count, num_past = len(weight), len(sequence.by_stream)
    if not count:
        return np.zeros_like(late_ns)
    rate = np.where(ranges.total_ns > 0, shares.waiting / np.maximum(ranges.total_ns, 1), 0.0)
    past_of = np.full(count, -1, np.int64)
    past_of[sequence.by_stream] = np.arange(num_past)

    # Unknowns: the density at each wait on its run, then at each wait in the history of its stream.
    rows, sources, signs = _range_ends(sequence, ranges, count, np.flatnonzero(rate > 0))
    entries = [(rows, sources, -signs * (rate * weight)[sources])]
    has_past = past_of[sources] >= 0
    entries.append((rows[has_past], count + past_of[sources[has_past]], entries[0][2][has_past]))
    for first, key in ((0, sequence.run), (count, sequence.stream)):
        same = np.flatnonzero(key[1:] == key[:-1])
        entries.append((first + same, first + same + 1, np.full(len(same), -1.0)))
    size = count + num_past
    entries.append((np.arange(size), np.arange(size), np.ones(size)))
    known = np.zeros((size, late_ns.shape[1]))
    np.add.at(known, rows, (signs * rate[sources])[:, None] * late_ns[sources])

    time = np.concatenate([sequence.time, sequence.time[sequence.by_stream]])
    place = np.empty(size, np.int32)  # the solver counts in 32 bits, and scipy before 1.16 leaves that to its caller
    place[np.lexsort((np.concatenate([np.arange(count), np.arange(num_past)]), time))[::-1]] = np.arange(size)
    row, column, value = (np.concatenate(part) for part in zip(*entries, strict=True))
    matrix = coo_array((value, (place[row], place[column])), shape=(size, size)).tocsc()
    right = np.empty_like(known)
    right[place] = known
    density = spsolve_triangular(matrix, right, lower=True, unit_diagonal=True)[place]
    received = density[:count]
    received[sequence.by_stream] += density[count:]
    costs: Float64 = late_ns + weight[:, None] * np.maximum(received, 0)
    return costs


def spread(sequence: Sequence, ranges: Ranges, amount_ns: Float64) -> Float64:
    """[num_waits of the sequence] ns that each receives when amount_ns[k] is spread over range k by weight."""
    count, num_past = len(sequence.edge), len(sequence.by_stream)
    rate = np.where(ranges.total_ns > 0, amount_ns / np.maximum(ranges.total_ns, 1), 0.0)
    density = []
    for size, first, stop in (
        (count, ranges.own_first, ranges.own_stop),
        (num_past, ranges.past_first, ranges.past_stop),
    ):
        steps = np.bincount(first, rate, size + 1) - np.bincount(stop, rate, size + 1)
        density.append(np.maximum(np.cumsum(steps)[:size], 0))
    received = density[0]
    received[sequence.by_stream] += density[1]
    return received * sequence.weight_ns


def _range_ends(sequence: Sequence, ranges: Ranges, count: int, some: Int64) -> tuple[Int64, Int64, Float64]:
    """(unknown, wait, sign): the wait's range ends at the unknown (+1), or begins behind it (-1)."""
    rows, sources, signs = [], [], []
    for first, key, low, high in (
        (0, sequence.run, ranges.own_first, ranges.own_stop),
        (count, sequence.stream, ranges.past_first, ranges.past_stop),
    ):
        full = some[high[some] > low[some]]
        rows.append(first + high[full] - 1)
        sources.append(full)
        signs.append(np.ones(len(full)))
        begins = full[low[full] > 0]
        begins = begins[key[low[begins] - 1] == key[low[begins]]]
        rows.append(first + low[begins] - 1)
        sources.append(begins)
        signs.append(-np.ones(len(begins)))
    return np.concatenate(rows), np.concatenate(sources), np.concatenate(signs)
