"""The first lines of a report: what costs the run most, how sure that is, and what is next."""

from __future__ import annotations

from tracekern.analysis.doubt import Blame
from tracekern.analysis.findings import Findings
from tracekern.analysis.questions.transfer_blame import TransferBlames
from tracekern.analysis.why.answer import MIN_SHARE, Answer, Cause, Silence
from tracekern.analysis.why.candidates import CauseKind
from tracekern.analysis.why.chance import MIN_ITERATIONS
from tracekern.analysis.why.replays import Saving
from tracekern.formatting import count, duration, percent, sentence
from tracekern.viewers.report.causes import accuse, describe_half, describe_incident, name_candidate
from tracekern.viewers.report.held_up import describe_held_up
from tracekern.viewers.report.questions.transfers import describe_blame, describe_evidence, why_none_stands_out

ON_CPU = "the CPU backend shows order and coverage, never durations of a GPU"
_ALONE = "One rank: no other to compare it with."
_CONTRADICTED = "; doubtful, as waits ended before their signals began, and of links nothing is said"
_MOST_INCIDENTS = 3
_ROUNDING_NS = 2
"""A blame and both of its limits are whole ns."""


def verdict(findings: Findings) -> str:
    """What costs most, and how much of the run; who did not come, if the run did not end; or why nothing is named."""
    answer = findings.answer
    if findings.held_up:
        return describe_held_up(findings.held_up)
    if (blames := _transfers_alone(findings)) is not None:
        named = [describe_blame(blame) for blame in blames.named[:1]]
        return sentence(named[0]) if named else f"No cause is named: {why_none_stands_out(blames)}."
    if len(findings.timeline.ranks) == 1 and not findings.absent:
        return _ALONE
    if not answer.causes:
        return f"{_incidents(answer)}No cause is named: {_why_none(findings)}."
    first = answer.causes[0]
    if (
        len(answer.causes) > 1 and first.saving.whole_ns < MIN_SHARE * answer.makespan_ns
    ):  # another one hides what it costs
        both, last = name_candidate(answer.causes[1].candidate), answer.causes[-1]
        saved = saved_of(answer, last.together_at_least_ns, last.together_ns)
        return f"{accuse(first)} Without it and {both} the run{_of_group(answer)} would be {saved} shorter."
    return tell_cause(answer, first)


def tell_cause(answer: Answer, cause: Cause) -> str:
    """What a cause does, and what it costs by itself."""
    saved = saved_of(answer, cause.at_least_ns, cause.saving.whole_ns)
    how = "if there were always room" if cause.candidate.kind is CauseKind.RING else "without"
    return f"{accuse(cause)} The run{_of_group(answer)} would be {saved} shorter {how}{_mostly_in(cause.saving)}."


def _of_group(answer: Answer) -> str:
    return " of its group" if answer.is_parted else ""


def _transfers_alone(findings: Findings) -> TransferBlames | None:
    """What held up waits for transfers, of a capture without any kernel."""
    return None if findings.timeline.launches else findings.transfer_blames


def part_of(findings: Findings) -> str:
    """Says that all numbers are of a part of the run; "" where they are of all of it."""
    parts = []
    if findings.window is not None:
        parts.append("the window from {} to {}".format(*map(duration, findings.window)))
    if findings.records_overwritten:
        parts.append("what the flight recorder kept")
    return f"all numbers are of {' and of '.join(parts)}" if parts else ""


def saved_of(answer: Answer, at_least_ns: float | None, most_ns: float) -> str:
    """ "2.6 ms (32 %)"; "1.9 ms to 2.6 ms (23 % to 32 %)" where hosts ran ahead; "up to 2.6 ms (32 %)" where the record
    does not say what is saved at least."""
    most, share = duration(most_ns), percent(most_ns, answer.makespan_ns)
    least_worth = MIN_SHARE * answer.makespan_ns
    if at_least_ns is not None and most_ns - at_least_ns < least_worth:
        return f"{most} ({share})"
    if at_least_ns is None or at_least_ns < least_worth:
        return f"up to {most} ({share})"
    return f"{duration(at_least_ns)} to {most} ({percent(at_least_ns, answer.makespan_ns)} to {share})"


def _mostly_in(saving: Saving) -> str:
    """Names the iteration that more than half of it is of; "" where none is."""
    largest = saving.largest
    return f", most of it in iteration {largest}" if largest is not None else ""


def evidence(findings: Findings) -> str:
    """What makes the first cause stand out; or the largest cost, where none does; "" where no cost is known."""
    answer = findings.answer
    if (blames := _transfers_alone(findings)) is not None:
        return describe_evidence(blames.named[0]) if blames.named else ""
    if not answer.causes:
        return _largest(answer)
    cause, first = answer.causes[0], answer.causes[0].finding
    if first is None:
        return "a replay in which nobody waits for room; nothing is compared"
    over = count(int(first.pattern.hits.sum()), "iteration")
    things = "links" if answer.causes[0].candidate.kind.is_of_links else "ranks"
    is_of_warps = answer.causes[0].candidate.kind in (CauseKind.PACE, CauseKind.AMOUNT, CauseKind.EXTRA)
    warps = ", all warps together" if is_of_warps and answer.causes[0].excess.warp is None else ""
    seen = f"{duration(first.excess_ns)} more than its peers{warps}, by the mean of {over}"
    alike = f"{things} that are all alike show less than {duration(first.alike_ns)}"
    if cause.candidate.kind is CauseKind.EXTRA:
        alike = "no other rank does it"
    is_exact = cause.at_least_ns is not None and cause.at_least_ns == cause.saving.whole_ns
    low, high = map(duration, cause.within_ns)
    sure = f"; what it saves lies between {low} and {high} in 19 of 20 such runs" if is_exact else ""
    return f"{seen}; {alike}{sure}{_CONTRADICTED if findings.is_contradicted else ''}"


def following(findings: Findings) -> str:
    """What costs most when the first cause is gone, and what all hosts alike would save; "" where there is neither."""
    answer = findings.answer
    parts = [
        f"{_name(cause)}: together {saved_of(answer, cause.together_at_least_ns, cause.together_ns)}"
        for cause in answer.causes[1:]
    ]
    parts += [describe_incident(answer, incident) for incident in answer.incidents if answer.causes]
    if answer.causes and answer.even_hosts_ns > answer.causes[-1].together_ns:
        shorter = duration(answer.even_hosts_ns)
        parts.append(f"by an estimate, {shorter} shorter if all hosts took as long as the median one")
    return "; ".join(parts)


def why_no_rank(findings: Findings) -> str:
    """Says that signals which ended waits were not recorded; "" where all were."""
    unmatched_ns = findings.wait_totals.unmatched_ns
    if not unmatched_ns:
        return ""
    share = percent(unmatched_ns, findings.wait_totals.waited_ns)
    signals = f"the signals that ended {share} of the waits, {duration(unmatched_ns)}"
    return f"no rank can be named: {signals}, are not on record"


def charged(blame: Blame) -> str:
    """A blame with its uncertainty from the clocks, which is often smaller on one side: no wait is below 0."""
    low_ns, high_ns = blame.late_ns - blame.likely.lo_ns, blame.likely.hi_ns - blame.late_ns
    low, high, largest = duration(low_ns), duration(high_ns), max(low_ns, high_ns)
    if low != high and abs(high_ns - low_ns) > _ROUNDING_NS:
        return f"{duration(blame.late_ns)} (-{low} to +{high})"
    return duration(blame.late_ns) + (f" ±{duration(largest)}" if largest > _ROUNDING_NS else "")


def _name(cause: Cause) -> str:
    """ "then rank 0's host"."""
    return f"then {name_candidate(cause.candidate, cause.is_host)}"


def _incidents(answer: Answer) -> str:
    """What happened now and then, ahead of the verdict; "" where nothing did, or durations mean nothing."""
    if answer.silence is Silence.CPU:
        return ""
    seen = "; ".join(describe_incident(answer, incident) for incident in answer.incidents[:_MOST_INCIDENTS])
    return f"{sentence(seen)} " if seen else ""


def _why_none(findings: Findings) -> str:
    answer = findings.answer
    number = count(answer.num_iterations, "iteration")
    if answer.silence is Silence.NO_COST:
        return answer.note
    if answer.silence is Silence.CPU:
        return ON_CPU
    if answer.silence is Silence.FEW_ITERATIONS:
        return f"{number} on record are too few to judge, {MIN_ITERATIONS} would do"
    if answer.silence is Silence.HALF:
        seen = "; ".join(describe_half(cause, len(findings.timeline.ranks)) for cause in answer.halves)
        return f"{seen}, and nothing says which of them are as they should be"
    if answer.incidents:
        return "no habit is shown"
    if answer.silence is Silence.SMALL:
        least = f"{100 * MIN_SHARE:.0f} % of the run"
        return f"over {number}, what takes longer than chance explains costs less than {least}, too little to matter"
    return f"over {number}, no rank and no link takes longer than chance explains"


def _largest(answer: Answer) -> str:
    if answer.halves:
        return f"alike, they would save {saved_of(answer, None, answer.halves[-1].together_ns)}"
    if answer.note or _incidents(answer):
        return ""
    if not answer.costs or answer.costs[0].saving.whole_ns < MIN_SHARE * answer.makespan_ns:
        return f"no single rank or link would make the run {100 * MIN_SHARE:.0f} % shorter by working like its peers"
    first = answer.costs[0]
    saved_ns = first.saving.whole_ns
    return (
        f"the largest cost is {name_candidate(first.candidate)}: "
        f"{duration(saved_ns)}, {percent(saved_ns, answer.makespan_ns)} of the run{_mostly_in(first.saving)}"
    )
