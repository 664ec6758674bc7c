"""Whether what a cause saves in each iteration is more than ranks that are all alike would show by chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekern.analysis.waits.matrix import median_of_rows
from tracekern.analysis.why.exchangeable import Event, Lead, leads
from tracekern.timeline.model import Float64

_MIN_ITERATIONS = 4
"""With fewer iterations nothing can be said about how they follow each other."""
_CAUTION = 1.2
"""What is weighed was picked as the largest of several kinds, and leads() knows of one."""
_FAR = 4
_MOST_CORRELATED = 0.95


@dataclass(frozen=True)
class Evidence:
    lead_ns: float
    """Its mean saving in an iteration less that of the others of its kind."""
    chance_ns: float
    """What equal ones would show by chance; nan where there are too few iterations to say."""
    event: Event | None
    """The one iteration that makes it stand out, if a single one does."""

    @property
    def stands_out(self) -> bool:
        return self.event is not None or self.lead_ns > self.chance_ns  # False for nan


def weigh(savings: Float64, member: int, floor_ns: float) -> Evidence:
    """Weighs one of several members of a kind.

    savings: [num_members, num_iterations] ns. floor_ns: less is never a lead, whatever the noise.
    """
    lead = _lead(savings, member, floor_ns)
    event = _single_event(savings, member, floor_ns)
    if event is not None:
        rest = _lead(np.delete(savings, event.iteration, axis=1), member, floor_ns)
        if rest.stands_out:  # not once, but each time
            return Evidence(rest.lead_ns, rest.noise_ns, None)
    return Evidence(lead.lead_ns, lead.noise_ns, event)


def _lead(savings: Float64, member: int, floor_ns: float) -> Lead:
    lead = leads(savings, floor_ns)[member]
    return Lead(lead.lead_ns, lead.noise_ns * _CAUTION * _persistence(savings), lead.num_iterations)


def _single_event(savings: Float64, member: int, floor_ns: float) -> Event | None:
    """Returns the one saving of `member` that is _FAR times as large as any other of any member, or None."""
    if savings.shape[1] < _MIN_ITERATIONS:
        return None
    excess = savings - median_of_rows(savings)[:, None]
    excess = excess - median_of_rows(excess.T)[None, :]
    iteration = int(excess[member].argmax())
    largest = float(excess[member, iteration])
    excess[member, iteration] = 0.0
    return Event(iteration, largest) if largest > max(_FAR * float(np.abs(excess).max()), floor_ns) else None


def _persistence(savings: Float64) -> float:
    """Returns how much less certain the mean of noise is if each iteration resembles the one before it.

    Of noise with a correlation r between neighbours the mean of n has sqrt((1 + r) / (1 - r)) times the deviation of
    independent noise. r is measured over all members, and corrected for what a short series hides of it.
    """
    count = savings.shape[1]
    if count < _MIN_ITERATIONS:
        return 1.0
    rest = savings - savings.mean(axis=1, keepdims=True)
    rest -= rest.mean(axis=0, keepdims=True)
    power = float((rest**2).sum())
    if power <= 0:
        return 1.0
    correlation = float((rest[:, 1:] * rest[:, :-1]).sum()) / power
    correlation = min(max(correlation + (1 + 3 * correlation) / count, 0.0), _MOST_CORRELATED)
    return float(((1 + correlation) / (1 - correlation)) ** 0.5)
