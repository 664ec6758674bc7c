"""The two tests behind a verdict. Both hold for runs of any distribution and assume only exchangeable labels.

`adjusted_p`: if head were base, any choice of which runs are called head would be as likely as the one observed. The
statistic is Welch's t of each metric; its largest value over all metrics, over all choices, controls the family error
(max-T: Westfall and Young, Resampling-Based Multiple Testing, 1993, algorithm 2.8, step-down).

`shift_interval`: Hodges and Lehmann's interval for a shift: differences of all pairs of runs in order, cut where the
exact distribution of Mann and Whitney's U says (Hollander and Wolfe, Nonparametric Statistical Methods, section 4.3).
An outlier shifts the interval by one pair in num_base, not by its size.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONFIDENCE = 0.95
"""Confidence of the interval for a shift."""
MAX_LABELINGS = 20_000
_SEED = 20_040_917  # a fixed one: the same runs give the same verdict
_TIE = 1e-9


def adjusted_p(base: Floats, head: Floats, grain: Floats) -> Floats:
    """Returns the family-wise adjusted p-value of each metric, [m].

    It is the probability that any metric grows as clearly as metric j if nothing has grown. base: [num_base, m], head:
    [num_head, m], logarithms; at least two runs of each side. grain: [m] logarithmic step of the values; smaller
    differences are ignored.
    """
    values = np.concatenate([base, head])
    heads = labelings(len(base), len(head))
    step = grain * math.sqrt((1 / len(base) + 1 / len(head)) / 12)
    observed = np.zeros((1, len(values)))
    observed[0, len(base) :] = 1
    t_observed = _welch(values, observed, step)[0]
    order = np.argsort(t_observed)  # ascending: step-down takes running maxima from the least clear metric on
    t_any = np.maximum.accumulate(_welch(values, heads, step)[:, order], axis=1)
    p_sorted = np.mean(t_any >= t_observed[order] - _TIE, axis=0)
    p_monotone = np.maximum.accumulate(p_sorted[::-1])[::-1]
    result = np.empty(len(order))
    result[order] = p_monotone
    return result


def shift_interval(base: Floats, head: Floats) -> tuple[Floats, Floats, Floats]:
    """Returns (low, estimate, high), each [m]: how far head lies above base, two-sided, for each metric by itself.

    base: [num_base, m], head: [num_head, m].
    """
    differences = np.sort((head[:, None, :] - base[None, :, :]).reshape(-1, base.shape[1]), axis=0)
    cut = _rank_sum_cut(len(base), len(head), (1 - CONFIDENCE) / 2)
    return differences[cut], np.median(differences, axis=0), differences[-1 - cut]


@functools.lru_cache(maxsize=8)
def labelings(num_base: int, num_head: int) -> Floats:
    """Returns labelings, [labelings, num_base + num_head], 1 for a run that is called head.

    Returns all labelings, or a fixed sample of MAX_LABELINGS, which includes the observed one (the last num_head runs),
    so that a p-value is never 0.
    """
    total = num_base + num_head
    if math.comb(total, num_head) <= MAX_LABELINGS:
        chosen = np.array(list(itertools.combinations(range(total), num_head)))
    else:
        rng = np.random.default_rng(_SEED)
        chosen = rng.permuted(np.tile(np.arange(total), (MAX_LABELINGS, 1)), axis=1)[:, :num_head]
        chosen[0] = np.arange(num_base, total)
    heads = np.zeros((len(chosen), total))
    np.put_along_axis(heads, chosen, 1.0, axis=1)
    heads.setflags(write=False)
    return heads


def _welch(values: Floats, heads: Floats, step: Floats) -> Floats:
    """Returns Welch's t, [labelings, m]; `step` keeps it finite for metrics without variance."""
    num_head = int(heads[0].sum())
    num_base = len(values) - num_head
    values = values - values.mean(axis=0)
    of_head, squares_of_head = heads @ values, heads @ values**2
    of_base, squares_of_base = values.sum(axis=0) - of_head, (values**2).sum(axis=0) - squares_of_head
    variance = (squares_of_head - of_head**2 / num_head) / (num_head * (num_head - 1))
    variance += (squares_of_base - of_base**2 / num_base) / (num_base * (num_base - 1))
    scale = np.sqrt(np.maximum(variance, 0) + step**2 + _TIE**2)
    t: Floats = (of_head / num_head - of_base / num_base) / scale
    return t


@functools.lru_cache(maxsize=64)
def _rank_sum_cut(num_base: int, num_head: int, tail: float) -> int:
    """Returns how many of the smallest pair differences to leave out of an interval that misses at most `tail` there.

    The number of labelings with U = u: count(i, j) = count(i - 1, j) moved by j, plus count(i, j - 1).
    """
    num_pairs = num_base * num_head
    row = [np.zeros(num_pairs + 1, np.float64) for _ in range(num_head + 1)]
    for counts in row:
        counts[0] = 1
    for _ in range(num_base):
        for j in range(1, num_head + 1):
            moved = np.zeros_like(row[j])
            moved[j:] = row[j][: num_pairs + 1 - j]
            row[j] = moved + row[j - 1]
    at_most = np.cumsum(row[num_head]) / math.comb(num_base + num_head, num_head)
    return max(int(np.searchsorted(at_most, tail, side="right")) - 1, 0)
