"""What costs head more than base: the cause of what grew, where head's record names one."""

from __future__ import annotations

from tracekern.analysis.why.answer import MIN_SHARE, Answer, Cause
from tracekern.analysis.why.candidates import Candidate


def grown_cause(head: Answer, base: Answer | None) -> tuple[Cause, float] | None:
    """Returns the named cause of head that costs most more than in base, and what it costs there in ns.

    None where no cause costs 1 % of the run more. base: None where no capture of it is left.
    """
    before: dict[Candidate, float] = {}
    if base is not None:
        before |= {cost.candidate: cost.saving.whole_ns for cost in base.costs}
        before |= {cause.candidate: cause.saving.whole_ns for cause in base.causes}
    costs = [(cause, before.get(cause.candidate, 0.0)) for cause in head.causes]
    grown = [(cause, ns) for cause, ns in costs if cause.saving.whole_ns - ns >= MIN_SHARE * head.makespan_ns]
    return max(grown, key=lambda one: one[0].saving.whole_ns - one[1], default=None)
