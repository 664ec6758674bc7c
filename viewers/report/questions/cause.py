"""What costs the run time? How much shorter it would be without each rank's or link's excess, and who is named."""

from __future__ import annotations

import math

from tracekern.analysis.findings import Findings
from tracekern.analysis.why.answer import Answer as Costs
from tracekern.analysis.why.answer import Cause, Cost
from tracekern.analysis.why.replays import Saving
from tracekern.formatting import duration, escape, percent, sentence
from tracekern.viewers.report.causes import describe_incident, name_candidate
from tracekern.viewers.report.frame import Answer, table
from tracekern.viewers.report.question import Question
from tracekern.viewers.report.verdict import evidence, following, saved_of, verdict

_MAX_COSTS = 12
_COLUMNS = ("without", "", "saved alone, of the run", "an iteration", "more than its peers", "chance explains")
_ASIDE = (
    "Each rank's work and host, and each link, is compared with its peers iteration by iteration. A cause is "
    "named where it takes longer, always or in a part of the iterations, than members that are all alike would by"
    " chance, and costs 1 % of the run or more: the run is replayed without what it takes longer, and all that "
    "waited for it worked out anew. What happened in three iterations or fewer is no habit, and names nobody. "
    "Rings that are too small, and what one rank alone runs, are no matter of chance. Two"
    " numbers, where hosts ran ahead: what is saved if they ask for kernels when they did, and if they ask as "
    "long after the kernel before as they did; <i>up to</i> where it is not on record when they asked. Causes can"
    " hide each other: <i>together</i> is what the run would save without this one and all that stand above it. "
    "How long warps waited is a picture of where they stand, never a price: one warp that waits can hold up a "
    "whole kernel, and a thousand that wait may hold up nothing."
)


def draw(findings: Findings) -> Answer:
    answer = findings.answer
    if answer.note:
        return Answer(escape(verdict(findings)))
    more = [sentence(said) for said in (evidence(findings), following(findings)) if said]
    text = f"<b>{escape(verdict(findings))}</b> {escape(' '.join(more))}"
    rows = [_row(answer, cost) for cost in _in_order(answer)[:_MAX_COSTS]]
    once = [[escape(sentence(describe_incident(answer, incident)))] for incident in answer.incidents[:_MAX_COSTS]]
    body = [table(_COLUMNS, rows, numbers=4)] if rows else []
    return Answer(text, [*body, *([table(("what happened now and then",), once)] if once else [])], _ASIDE)


QUESTION = Question("cause", "Cause", "What costs the run time?", draw, order=40)


def _in_order(answer: Costs) -> list[Cause | Cost]:
    """What is named first, then what else the run would be shorter without."""
    named = {cause.candidate for cause in answer.causes}
    others = (cost for cost in answer.costs if cost.candidate not in named and cost.saving.whole_ns > 0)
    return [*answer.causes, *others]


def _row(answer: Costs, cost: Cause | Cost) -> list[str]:
    saved_ns = cost.saving.whole_ns
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
        duration(cost.excess_ns),
        duration(cost.finding.alike_ns) if isinstance(cost, Cause) and cost.finding else "-",
    ]


def _each(saving: Saving) -> str:
    if math.isnan(saving.error_ns):
        return "-"
    return f"{duration(saving.mean_ns)} ± {duration(saving.error_ns)}"
