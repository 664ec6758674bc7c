"""What ranks, or links, that are all alike would show over the iterations at hand, and which one shows more.

Every member has one time in every iteration. What is common to an iteration and what is common to a member are taken
out; what is left is noise, of standard deviation sigma. Over n iterations the mean of a member is then off by
sigma / sqrt(n), and the largest of all members leads the mean of the others by three to four times as much, by chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.waits.matrix import median_of_rows
from tracekern.timeline.model import Float64, Int64

CHANCE = 0.005
"""That the largest of exchangeable members leads by more than `noise_ns`, and that any of their single times stands
out."""
_MIN_DEGREES = 2
_NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""


@dataclass(frozen=True)
class Lead:
    """By how much a member's mean time exceeds that of the others, and what chance explains."""

    lead_ns: float
    noise_ns: float
    """nan where too few iterations say how large it is."""
    num_iterations: int

    @property
    def stands_out(self) -> bool:
        return self.lead_ns > self.noise_ns  # False for nan


@dataclass(frozen=True)
class Event:
    """One time that stands out from all others of its member, and of its iteration."""

    iteration: int
    """Column of the times."""
    excess_ns: float


def leads(times: Float64, floor_ns: Float64 | float) -> tuple[Lead, ...]:
    """One for each member, by its mean over the iterations minus that of all others.

    times: [num_members, num_iterations], nan where a member has none. floor_ns: of all or of each member: by how much
    its mean may be wrong whatever the noise: no less is a lead.
    """
    count = np.isfinite(times).sum(axis=1)
    mean = _means(times)
    known = count > 0
    num_others = max(int(known.sum()) - 1, 1)
    others = (mean[known].sum() - mean) / num_others
    sigma, degrees = _sigma(times)
    share = 1 / np.maximum(count, 1)
    error = np.sqrt(share + (share[known].sum() - share) / num_others**2)
    limit = _limit(int(known.sum()), degrees) * sigma
    noise = np.maximum(limit * error, floor_ns) if np.isfinite(limit) else np.full(len(times), np.nan)
    noise = np.where(known & (known.sum() > 1), noise, np.nan)
    return tuple(map(Lead, (mean - others).tolist(), noise.tolist(), count.tolist()))


def indistinct(times: Float64, member: int, floor_ns: float) -> Int64:
    """The other members whose mean cannot be told from that of `member`: the difference of two is within two of its
    standard deviations."""
    count, mean = np.isfinite(times).sum(axis=1), _means(times)
    share = 1 / np.maximum(count, 1)
    apart = np.abs(mean - mean[member]) > np.maximum(2 * _sigma(times)[0] * np.sqrt(share + share[member]), floor_ns)
    apart[member] = True
    return np.flatnonzero(~apart & (count > 0))


def single_event(times: Float64, member: int, floor_ns: float) -> Event | None:
    """The one time of `member` that chance does not explain; None where there is no such time, or where any other time
    of any member has half of its excess or more."""
    from scipy.stats import norm

    known = np.isfinite(times)
    if min(known.any(axis=1).sum(), known.any(axis=0).sum() - 1) < 2:
        return None
    excess = times - median_of_rows(times)[:, None]
    excess = excess - median_of_rows(excess.T)[None, :]
    spread = _NORMAL_MAD * float(np.median(np.abs(excess[known])))
    excess = np.where(known, excess, -np.inf)
    first, second = (np.unravel_index(place, times.shape) for place in np.argsort(excess, axis=None)[:-3:-1])
    limit = max(float(norm.isf(CHANCE / known.sum())) * 1.25 * spread, floor_ns)
    largest = float(excess[first])
    if first[0] != member or largest <= limit or largest < 2 * float(excess[second]):
        return None
    return Event(int(first[1]), largest)


def _limit(num_members: int, degrees: int) -> float:
    """How many standard deviations of its mean the largest of exchangeable members leads by, in all but CHANCE of
    cases; nan where too few times say how large these are."""
    from scipy.stats import t

    return float(t.isf(CHANCE / num_members, degrees)) if degrees >= _MIN_DEGREES else float("nan")


def _sigma(times: Float64) -> tuple[float, int]:
    """Standard deviation of what is common neither to a member nor to an iteration, and its degrees of freedom."""
    rest = times - _means(times)[:, None]
    rest = rest - _means(rest.T)[None, :]
    known = np.isfinite(times)
    degrees = int(known.sum()) - int(known.any(axis=1).sum()) - int(known.any(axis=0).sum()) + 1
    return float(np.sqrt(np.nansum(rest**2) / max(degrees, 1))), degrees


def _means(values: Float64) -> Float64:
    """[n] mean of the known values of each row; 0 where there are none."""
    known = np.isfinite(values)
    means: Float64 = np.where(known, values, 0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    return means
