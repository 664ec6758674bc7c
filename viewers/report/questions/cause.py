"""What costs the run time? How much shorter it would be without each rank's or link's excess, and who is named."""

from __future__ import annotations

import math

from tracekern.analysis.findings import Findings
from tracekern.analysis.why.answer import Answer as Costs
from tracekern.analysis.why.answer import Cause, Cost
from tracekern.analysis.why.replays import Saving
from tracekern.formatting import duration, escape, percent, sentence
from tracekern.viewers.report.frame import Answer, table
from tracekern.viewers.report.question import Question
from tracekern.viewers.report.verdict import evidence, following, name_candidate, saved_of, verdict

_MAX_COSTS = 12
_COLUMNS = ("without", "", "saved alone, of the run", "an iteration", "beyond its peers", "chance explains")
_ASIDE = (
    "The run was replayed with the times of one rank, or link, swapped for those of up to three peers, and all that "
    "waited for them was worked out anew. A cost is named where, in the mean of all iterations, it exceeds that of the "
    "peers by more than chance explains, and is 1 % of the run or more. Two numbers, where hosts ran ahead: what is "
    "saved if they ask for kernels when they did, and if they ask as long after the kernel before as they did; "
    "<i>up to</i> where it is not on record when they asked. Causes can hide each other: "
    "<i>together</i> is what the run would save without this one and all that stand above it. How long warps waited is "
    "a picture of where they stand, never a price: one warp that waits can hold up a whole kernel, and a thousand that "
    "wait may hold up nothing."
)


def draw(findings: Findings) -> Answer:
    answer = findings.answer
    if answer.note:
        return Answer(escape(verdict(findings)))
    more = [sentence(said) for said in (evidence(findings), following(findings)) if said]
    text = f"<b>{escape(verdict(findings))}</b> {escape(' '.join(more))}"
    rows = [_row(answer, cost) for cost in _in_order(answer)[:_MAX_COSTS]]
    return Answer(text, [table(_COLUMNS, rows, numbers=4)] if rows else [], _ASIDE)


QUESTION = Question("cause", "Cause", "What costs the run time?", draw, order=40)


def _in_order(answer: Costs) -> list[Cause | Cost]:
    """What is named first, then what else the run would be shorter without."""
    named = {cause.candidate for cause in answer.causes}
    others = (cost for cost in answer.costs if cost.candidate not in named and cost.saving.whole_ns > 0)
    return [*answer.causes, *others]


def _row(answer: Costs, cost: Cause | Cost) -> list[str]:
    saved_ns, found = cost.saving.whole_ns, cost.evidence
    name, said = escape(name_candidate(cost.candidate)), ""
    saved = f"{duration(saved_ns)} ({percent(saved_ns, answer.makespan_ns)})"
    if isinstance(cost, Cause):
        name = f"<b>{escape(name_candidate(cost.candidate, cost.is_host))}</b>"
        is_first = cost is answer.causes[0]
        together = saved_of(answer, cost.together_at_least_ns, cost.together_ns)
        said = "named" if is_first else f"named; together {together}"
        saved = saved_of(answer, cost.at_least_ns, saved_ns)
    return [
        name,
        said,
        saved,
        _each(cost.saving),
        duration(found.lead_ns),
        "-" if math.isnan(found.chance_ns) else duration(found.chance_ns),
    ]


def _each(saving: Saving) -> str:
    if math.isnan(saving.error_ns):
        return "-"
    return f"{duration(saving.mean_ns)} ± {duration(saving.error_ns)}"
