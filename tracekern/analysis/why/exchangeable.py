"""What ranks, or links, that are all alike would show over the iterations at hand, and which one shows more.

Every member has one time in every iteration. What is common to an iteration and what is common to a member are taken
out; what is left is noise, of standard deviation sigma. Over n iterations the mean of a member is then off by
sigma / sqrt(n), and the largest of all members leads the mean of the others by three to four times as much, by chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.errors import packages_for
from tracekern.timeline.model import Float64

CHANCE = 0.005
"""That the largest of exchangeable members leads by more than `noise_ns`."""
_MIN_DEGREES = 2


@dataclass(frozen=True)
class Lead:
    """A member's mean time less that of the others, and what chance explains of it."""

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


def _limit(num_members: int, degrees: int) -> float:
    """How many standard deviations of its mean the largest of exchangeable members leads by, in all but CHANCE of
    cases; nan where too few times say how large these are."""
    if degrees < _MIN_DEGREES:
        return float("nan")
    with packages_for("saying why ranks waited"):
        from scipy.special import stdtrit  # as scipy.stats.t.isf computes it; importing that takes two seconds

    return -float(stdtrit(degrees, CHANCE / num_members))


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
