"""The two tests behind a verdict. Both hold for runs of any distribution and assume only exchangeable labels.

Disturbed launches are slow ones, and a few of them would hide a growth. So both tests drop the slowest runs.

`adjusted_p`: if head were base, any choice of which runs are called head would be as likely as the one observed. The
largest statistic over all metrics, over all choices, controls the family error (max-T: Westfall and Young,
Resampling-Based Multiple Testing, 1993, algorithm 2.8, step-down). The statistic of a metric is Student's t with pooled
variance after dropping the k slowest runs of both sides together, the largest over k. Which runs are dropped depends on
no label, so all choices stay equally likely.

`shift_interval`: Hodges and Lehmann's interval for a shift, after dropping the slowest runs of each side: the
differences of all pairs of runs in order, cut where few enough choices of labels would leave so many pairs beyond. The
number of pairs above zero depends on ranks alone, so its distribution is known (Hollander and Wolfe, Nonparametric
Statistical Methods, section 4.3, has it without dropping runs). The lower end is the highest of those with none, few
and many runs dropped; their cuts are such that one of them misses as seldom as a single one would.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CONFIDENCE = 0.9
"""Confidence of the interval for a shift; either end by itself misses it with half the rest, 5 times in 100."""
_DROPPED = 2
"""Eighths of the runs of a side that are dropped as slow."""
MAX_LABELINGS = 20_000
_SEED = 20_040_917  # a fixed one: the same runs give the same verdict
_TIE = 1e-9


def adjusted_p(base: Floats, head: Floats, grain: Floats) -> Floats:
    """Returns the family-wise adjusted p-value of each metric, [m].

    It is the probability that any metric grows as clearly as metric j if nothing has grown. base: [num_base, m], head:
    [num_head, m], logarithms; at least four runs of each side. grain: [m] logarithmic step of the values; smaller
    differences are ignored.
    """
    t = largest_t(np.concatenate([base, head]), labelings(len(base), len(head)), grain)
    t_observed = t[0].copy()
    order = np.argsort(t_observed)  # ascending: step-down takes running maxima from the least clear metric on
    t_any = np.maximum.accumulate(t[:, order], axis=1)
    p_sorted = np.mean(t_any >= t_observed[order] - _TIE, axis=0)
    p_monotone = np.maximum.accumulate(p_sorted[::-1])[::-1]
    result = np.empty(len(order))
    result[order] = p_monotone
    return result


def shift_interval(base: Floats, head: Floats) -> tuple[Floats, Floats, Floats]:
    """Returns (low, estimate, high), each [m]: how far head lies above base, two-sided, for each metric by itself.

    base: [num_base, m], head: [num_head, m]. Estimate and upper end lack the slowest quarter of each side: slow runs of
    base hide a growth, slow runs of head may be one.
    """
    below, above = _cuts(len(base), len(head))
    upper = _differences(base, head, _DROPPED)
    low = np.max([_differences(base, head, eighths)[cut] for eighths, cut in below], axis=0)
    return low, np.median(upper, axis=0), upper[-1 - above]


def num_fast(num_runs: int, eighths: int = _DROPPED) -> int:
    """Returns how many runs of a side are left when `eighths` of 8 are dropped."""
    return num_runs - num_runs * eighths // 8


def _differences(base: Floats, head: Floats, eighths: int) -> Floats:
    """Returns the differences of all pairs of runs that are left, [pairs, m], in order."""
    fast_base, fast_head = (np.sort(side, axis=0)[: num_fast(len(side), eighths)] for side in (base, head))
    differences = (fast_head[:, None, :] - fast_base[None, :, :]).reshape(-1, base.shape[1])
    return np.sort(differences, axis=0)


@functools.lru_cache(maxsize=8)
def labelings(num_base: int, num_head: int) -> Floats:
    """Returns labelings, [labelings, num_base + num_head], 1 for a run that is called head.

    Returns all labelings, or a fixed sample of MAX_LABELINGS. The first is the observed one (the last num_head runs),
    so that a p-value is never 0.
    """
    total = num_base + num_head
    if math.comb(total, num_head) <= MAX_LABELINGS:
        chosen = np.array(list(itertools.combinations(range(total), num_head)))[::-1]
    else:
        rng = np.random.default_rng(_SEED)
        chosen = rng.permuted(np.tile(np.arange(total), (MAX_LABELINGS, 1)), axis=1)[:, :num_head]
        chosen[0] = np.arange(num_base, total)
    heads = np.zeros((len(chosen), total))
    np.put_along_axis(heads, chosen, 1.0, axis=1)
    heads.setflags(write=False)
    return heads


def largest_t(values: Floats, heads: Floats, grain: Floats) -> Floats:
    """Returns the statistic, [labelings, m]. values: [num_runs, m]; heads: [labelings, num_runs], as of labelings().

    Dropped are none, an eighth and five sixteenths of the runs, but two of either side are left. Runs that tie for
    being dropped keep a common fraction of their weight: their order in `values` says which side they are on.
    """
    total, num_head = len(values), int(heads[0].sum())
    in_order = np.sort(values, axis=0)
    most_dropped = min(num_head, total - num_head) - 2
    best = np.full((len(heads), values.shape[1]), -np.inf)
    for num_dropped in sorted({min(part, most_dropped) for part in (0, total // 8, 5 * total // 16)}):
        cut = in_order[total - num_dropped - 1]
        is_below, is_tied = values < cut, values == cut
        weights = is_below + is_tied * ((total - num_dropped - is_below.sum(axis=0)) / is_tied.sum(axis=0))
        np.maximum(best, _pooled_t(values, weights, heads, grain), out=best)
    return best


def _pooled_t(values: Floats, weights: Floats, heads: Floats, grain: Floats) -> Floats:
    """Returns Student's t, [labelings, m]; `grain` keeps it finite for metrics without variance.

    weights: [num_runs, m], 0 to 1, at least 1 in sum on either side of every labeling.
    """
    total = weights.sum(axis=0)
    deviations = values - (weights * values).sum(axis=0) / total
    squares = (weights * deviations**2).sum(axis=0)
    of_head, num_head = heads @ (weights * deviations), heads @ weights  # the deviations of base are -of_head in sum
    inverse = 1 / num_head + 1 / (total - num_head)
    within = np.maximum(squares - of_head**2 * inverse, 0) / (total - 2)
    t: Floats = of_head * np.sqrt(inverse / (within + grain**2 / 12 + _TIE**2))
    return t


@functools.lru_cache(maxsize=64)
def _cuts(num_base: int, num_head: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """Returns how many differences to leave out at the lower end, (eighths of the runs dropped, differences) each, and
    at the upper end of the interval.

    An end misses the shift when at most that many pairs lie beyond the shift: so many labelings of runs in order have
    as few, (1 - CONFIDENCE) / 2 of all at most; of the lower end any of its cuts.
    """
    miss = (1 - CONFIDENCE) / 2
    parts = (0, 2, 3) if min(num_base, num_head) >= 8 else (0, 2)
    chances = [_chances(num_base, num_head, eighths, of_lower=True) for eighths in parts]
    smallest = np.min([chance[num_pairs] for num_pairs, chance in chances], axis=0)
    level = np.sort(smallest)[max(int(miss * len(smallest)) - 1, 0)]
    if np.mean(smallest <= level + _TIE) > miss:
        level = max(smallest[smallest < level - _TIE], default=0.0)
    below = tuple((eighths, _last(chance, level)) for eighths, (_, chance) in zip(parts, chances, strict=True))
    return below, _last(_chances(num_base, num_head, _DROPPED, of_lower=False)[1], miss)


def _chances(num_base: int, num_head: int, eighths: int, of_lower: bool) -> tuple[npt.NDArray[np.int64], Floats]:
    """Returns ([labelings] the number of pairs beyond the end, [pairs + 1] how many of all labelings have at most so
    many)."""
    heads = labelings(num_base, num_head)
    is_head = heads * (np.cumsum(heads, axis=1) <= num_fast(num_head, eighths))
    is_base = (1 - heads) * (np.cumsum(1 - heads, axis=1) <= num_fast(num_base, eighths))
    slow, fast = (is_base, is_head) if of_lower else (is_head, is_base)
    num_pairs = (slow * np.cumsum(fast, axis=1)).sum(axis=1).astype(np.int64)
    return num_pairs, np.cumsum(np.bincount(num_pairs)) / len(heads)


def _last(chance: Floats, level: float) -> int:
    return max(int(np.searchsorted(chance, level + _TIE, side="right")) - 1, 0)
