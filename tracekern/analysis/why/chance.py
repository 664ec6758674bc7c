"""The one test against chance: who takes longer than members that are all alike would, and in which iterations.

Each *measure* has the excess of its members (ranks, warps or links) over their peers, iteration by iteration. A
*finding* is a set of members and a pattern of iterations with the largest normalised sum of all. What chance alone
would show is worked out from the run itself: noise of the same persistence is drawn from its own residuals, and the
whole search done anew. That the largest of many was picked is thus part of the test. docs/analysis.md has the steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.timeline.model import Float64, Int64, Mask

NUM_DRAWS = 999
"""A finding stands out where none of so many draws shows as much: of all members alike, one run in a thousand has one
by chance, for each measure."""
MIN_ITERATIONS = 8
"""With fewer, costs are told and nothing is judged."""
MIN_FOR_PATTERNS = 20
_MIN_SIDE, _MIN_HITS, _MAX_STRIDE = 3, 4, 5
_DRAWS_AT_ONCE, _NUMBERS_AT_ONCE = 37, 1 << 19
"""So many runs are drawn at a time, or as many as have no more numbers by pattern: what is worked with stays in the
cache."""
_PERSISTENCES = np.append(np.linspace(0, 0.9, 19), [0.925, 0.95, 0.97])
_LONG = 64
"""A series of more iterations shows its persistence as it is."""
_MANY, _SURE = 200, 2.5
"""Correlations 2 and 3 apart count if the table has so many numbers, and they exceed so many standard errors."""
_ALIKE = 1.5
"""Members of a set differ by no more than such a factor."""
_DOUBT = 2.0
"""Persistence may be so many standard errors more than what is seen."""
_CLIP = 4.0
"""Residuals count at most so many robust standard deviations where spread and persistence are worked out."""


@dataclass(frozen=True)
class Pattern:
    """Iterations in which something repeats."""

    hits: Mask
    """[num_iterations]"""
    begin: int = 0
    """The first one."""
    until: int = 0
    """The first one behind the last; 0: to the end."""
    stride: int = 1
    """Each so-many-th."""


@dataclass(frozen=True)
class Measure:
    """Excess of members over their peers."""

    name: str
    excess: Float64
    """[num_members, num_iterations] ns"""
    floor_ns: float
    """Excess may be wrong by so much, whatever the noise."""
    groups: tuple[Int64, ...] = ()
    """Members that belong together, as the ranks of a node, and may be found as one."""
    has_sets: bool = True
    """Whether the k members that take longest may be found as one."""
    is_chance: bool = True
    """Whether chance may be behind it: not where one does what no other does, in as many iterations as make a habit."""


@dataclass(frozen=True)
class Finding:
    """What stands out most, and what chance would show in its place."""

    measure: str
    members: Int64
    pattern: Pattern
    excess_ns: float
    """Mean excess of a member in an iteration of the pattern."""
    stands_out: bool = False
    error_ns: float = np.nan
    """The standard error of the excess."""
    alike_ns: float = np.nan
    """Members that are all alike would show less than this."""


def patterns(num_iterations: int) -> tuple[Pattern, ...]:
    """Returns all iterations; of MIN_FOR_PATTERNS and more also those until and from each, and each 2nd to 5th."""
    every = np.ones(num_iterations, bool)
    found = [Pattern(every)]
    if num_iterations < MIN_FOR_PATTERNS:
        return tuple(found)
    number = np.arange(num_iterations)
    for cut in range(_MIN_SIDE, num_iterations - _MIN_SIDE + 1):
        found += [Pattern(number < cut, 0, cut), Pattern(number >= cut, cut)]
    for stride in range(2, _MAX_STRIDE + 1):
        hits = [(first, (number - first) % stride == 0) for first in range(stride)]
        found += [Pattern(mask, first, 0, stride) for first, mask in hits if mask.sum() >= _MIN_HITS]
    return tuple(found)


def beside_peers(values: Float64) -> Float64:
    """Returns each of [..., num_members, num_iterations] less the median of the other members in that iteration."""
    return _swapped(_beside_peers(_swapped(values)))


def _beside_peers(values: Float64) -> Float64:
    """The same of [..., num_iterations, num_members]."""
    count = values.shape[-1] - 1
    if count < 1:
        return np.zeros_like(values)
    ordered = np.sort(values, axis=-1)

    def of_others(place: int) -> Float64:
        low, high = ordered[..., place : place + 1], ordered[..., place + 1 : place + 2]
        return np.where(values <= low, high, low)

    return values - (of_others((count - 1) // 2) + of_others(count // 2)) / 2


def search(measure: Measure, seed: int = 0) -> Finding | None:
    """Returns what stands out most, by chance or not; None where nothing has any excess."""
    if len(measure.excess) < 2:
        return None
    known = patterns(measure.excess.shape[1])
    seen = _Search(measure, known)
    if seen.largest <= 0:
        return None
    hits = known[seen.pattern].hits
    excess_ns = float(measure.excess[seen.members][:, hits].mean())
    if not measure.is_chance:
        is_habit = int((measure.excess[seen.members][:, hits] > measure.floor_ns).sum()) >= _MIN_HITS
        return Finding(measure.name, seen.members, known[seen.pattern], excess_ns, is_habit, seen.error_ns, 0.0)
    rng, largest = np.random.default_rng(seed), list[float]()
    at_once = int(np.clip(_NUMBERS_AT_ONCE // (len(measure.excess) * len(known)), 1, _DRAWS_AT_ONCE))
    while len(largest) < NUM_DRAWS and max(largest, default=0.0) < seen.largest:
        largest += seen.noise.draw(rng, at_once).tolist()
    alike_ns = max(largest) * seen.spread_ns / float(np.sqrt(len(seen.members) * (hits.sum() - 1)))
    stands_out = excess_ns > 0 and max(largest) < seen.largest
    return Finding(measure.name, seen.members, known[seen.pattern], excess_ns, stands_out, seen.error_ns, alike_ns)


class _Search:
    """One measure, normalised, and where its largest sum is."""

    def __init__(self, measure: Measure, known: Sequence[Pattern]) -> None:
        self.measure, self._known = measure, known
        sums = _habits(_centred(measure.excess), known)
        by_set, order = _by_set(sums, measure.has_sets)
        by_group = _by_group(sums, measure.groups)
        if len(by_group) and by_group.max() >= by_set.max() * (1 - 1e-9):
            group, self.pattern = (int(place) for place in np.unravel_index(by_group.argmax(), by_group.shape))
            self.members = measure.groups[group]
        else:
            count, self.pattern = (int(place) for place in np.unravel_index(by_set.argmax(), by_set.shape))
            self.members = np.sort(self._alike(order[: count + 1, self.pattern], sums[:, self.pattern]))
        rest = measure.excess.copy()
        inside = np.ix_(self.members, known[self.pattern].hits)
        rest[inside] -= rest[inside].mean(axis=1, keepdims=True)
        self.noise = _Noise(rest, measure, known)
        """Draws runs in which members are alike from the excess that is left without the finding."""
        self.spread_ns = float(_spread(measure.excess, measure.floor_ns)) * self.noise.inflation
        of_rest = float(_spread(rest, measure.floor_ns)) * self.noise.inflation
        self.error_ns = of_rest / float(np.sqrt(max(len(self.members) * known[self.pattern].hits.sum(), 1)))
        self.largest = float(max(by_set.max(), by_group.max(initial=-np.inf))) / self.spread_ns

    def _alike(self, members: Int64, sums: Float64) -> Int64:
        """Returns those of a set that exceed their peers as much as the largest; the others are found after it."""
        alike: Int64 = members[sums[members] * _ALIKE >= sums[members].max()]
        return alike


class _Noise:
    """Runs without any cause: autoregressive noise of the residuals of one run."""

    def __init__(self, rest: Float64, measure: Measure, known: Sequence[Pattern]) -> None:
        count = rest.shape[1]
        rest = rest - rest.mean(axis=1, keepdims=True)
        self._persistence = _persistence(rest)
        self.inflation = float(np.sqrt((1 + self._persistence) / (1 - self._persistence)))
        """How much less certain a mean is than one of independent numbers: measures of any persistence compare."""
        white = rest[:, 1:] - self._persistence * rest[:, :-1]
        white = np.concatenate([rest[:, :1] * np.sqrt(1 - self._persistence**2), white], axis=1)
        self._white = white.ravel() * np.sqrt(count / max(count - 1, 1))
        self._measure, self._known = measure, known

    def draw(self, rng: np.random.Generator, count: int) -> Float64:
        """Returns [count] the largest normalised sums of so many runs."""
        num_members, num_iterations = self._measure.excess.shape
        noise = _swapped(rng.choice(self._white, (count, num_members, num_iterations)))
        noise[..., 0, :] /= np.sqrt(1 - self._persistence**2)
        for iteration in range(1, num_iterations if self._persistence else 0):
            noise[..., iteration, :] += self._persistence * noise[..., iteration - 1, :]
        excess = _swapped(_beside_peers(noise))
        spread = np.maximum(_spread(excess, self._measure.floor_ns), 1e-9) * self.inflation
        sums = _habits(_centred(excess), self._known) / spread[:, None, None]
        largest: Float64 = _by_set(sums, self._measure.has_sets)[0].max(axis=(-2, -1))
        if self._measure.groups:
            largest = np.maximum(largest, _by_group(sums, self._measure.groups).max(axis=(-2, -1)))
        return largest


def _persistence(rest: Float64) -> float:
    """Returns how much an iteration resembles the one before it: the correlation of residuals of members, pooled.

    What wanders slowly under other noise shows in iterations further apart.
    """
    count, rest = rest.shape[1], _clipped(rest)
    power, error = float((rest**2).sum()), 1 / np.sqrt(rest.size)
    known = _seen_of(min(count, _LONG))
    found = 0.0
    for apart, seen_of in enumerate(known, 1):
        seen = float((rest[:, apart:] * rest[:, :-apart]).sum()) / power if power > 0 else 0.0
        if apart == 1 or (rest.size >= _MANY and seen - seen_of[0] > _SURE * error):
            found = max(found, float(np.interp(seen + _DOUBT * error, seen_of, _PERSISTENCES)))
    return found


@functools.cache
def _seen_of(count: int) -> Float64:
    """[3, num_persistences] the correlation that is seen, 1 to 3 apart, in `count` numbers less their mean."""
    step = np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    center = np.eye(count) - 1 / count
    covariances = [center @ persistence**step @ center for persistence in _PERSISTENCES]
    seen = [[np.trace(found, apart) / np.trace(found) for found in covariances] for apart in (1, 2, 3)]
    return np.maximum.accumulate(np.array(seen), axis=1)


def _habits(excess: Float64, known: Sequence[Pattern]) -> Float64:
    """[..., num_members, num_patterns] the normalised sum of [..., num_members, num_iterations] over each pattern,
    without its largest: what happened once is no habit."""
    members_last = _swapped(excess)
    forth, back = members_last, members_last[..., ::-1, :]
    until = np.cumsum(forth, axis=-2) - np.maximum.accumulate(forth, axis=-2)
    from_there = (np.cumsum(back, axis=-2) - np.maximum.accumulate(back, axis=-2))[..., ::-1, :]
    rest = np.empty((*excess.shape[:-2], len(known), excess.shape[-2]))
    for number, pattern in enumerate(known):
        if pattern.stride > 1:
            strided = members_last[..., pattern.begin :: pattern.stride, :]
            rest[..., number, :] = strided.sum(axis=-2) - strided.max(axis=-2)
        else:
            sums, place = (until, pattern.until - 1) if pattern.until else (from_there, pattern.begin)
            rest[..., number, :] = sums[..., place, :]
    rest /= np.sqrt(np.array([pattern.hits.sum() for pattern in known]) - 1)[:, None]
    return np.moveaxis(rest, -1, -2)


def _swapped(values: Float64) -> Float64:
    """Copies [..., num_members, num_iterations] so that members lie side by side, which is how what goes through
    iterations one by one wants them; or the other way round."""
    return np.ascontiguousarray(np.moveaxis(values, -2, -1))


def _centred(excess: Float64) -> Float64:
    """[..., num_members, num_iterations] without what most members exceed the median of their peers by: where times are
    skewed, all do."""
    centred: Float64 = excess - np.median(excess.mean(axis=-1, keepdims=True), axis=-2, keepdims=True)
    return centred


def _clipped(excess: Float64) -> Float64:
    """[..., num_members, num_iterations] what is left of each member's mean when outliers are cut.

    Where most residuals are 0, their mean says how large the others are.
    """
    rest = excess - np.median(excess, axis=-1, keepdims=True)
    median, mean = (of(np.abs(rest), axis=(-2, -1), keepdims=True) for of in (np.median, np.mean))
    limit = _CLIP * np.maximum(1.4826 * median, mean)
    cut = np.clip(rest, -limit, limit)
    return np.asarray(cut - cut.mean(axis=-1, keepdims=True), float)


def _spread(excess: Float64, floor_ns: float) -> Float64:
    """Standard deviation of members from their own means, pooled: of [..., num_members, num_iterations], [...]."""
    rest = _clipped(excess)
    count = excess.shape[-1]
    spread = np.sqrt((rest**2).mean(axis=(-2, -1)) * count / max(count - 1, 1))
    return np.asarray(np.maximum(spread, floor_ns), float)


def _by_set(sums: Float64, has_sets: bool) -> tuple[Float64, Int64]:
    """([..., k, num_patterns] the normalised sum of the k + 1 largest members of [..., num_members, num_patterns], up
    to half of all; which members these are, largest first)"""
    most = max(sums.shape[-2] // 2, 1) if has_sets else 1
    if most == 1:
        order = np.expand_dims(sums.argmax(axis=-2), -2)
        return np.take_along_axis(sums, order, axis=-2), order
    order = np.argsort(-sums, axis=-2)
    ordered = np.take_along_axis(sums, order, axis=-2)[..., :most, :]
    return ordered.cumsum(axis=-2) / np.sqrt(np.arange(1, most + 1))[:, None], order


def _by_group(sums: Float64, groups: Sequence[Int64]) -> Float64:
    """[..., num_groups, num_patterns] the normalised sum of each group."""
    found = [sums[..., group, :].sum(axis=-2) / np.sqrt(len(group)) for group in groups]
    return np.stack(found, axis=-2) if found else np.empty((*sums.shape[:-2], 0, sums.shape[-1]))
