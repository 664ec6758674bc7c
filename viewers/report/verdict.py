"""The first two sentences of a report: who, or what, is to blame for the waiting, and what that costs. And the sums."""

from __future__ import annotations

from tracekern.analysis.causes.blame import Target
from tracekern.analysis.doubt import Blame
from tracekern.analysis.findings import Findings
from tracekern.analysis.naming.culprit import Culprit, Kind, Suspect, Why
from tracekern.formatting import count, duration, percent, ranks, unit_for
from tracekern.viewers.report.questions.cause import HOST_OR_KERNEL, uncaused_ns

_ALONE = "One rank: no other to wait for."
_ROUNDING_NS = 2
"""A blame and both of its limits are whole ns."""
_MAX_SUSPECTS = 3


def verdict(findings: Findings) -> str:
    """Two sentences; one where there is nothing to say about costs."""
    if len(findings.summary.ranks) < 2:
        return f"No rank can be named: {_and(findings.absent)}." if findings.absent else _ALONE
    if not findings.summary.aligned:
        return "No rank can be named: the clocks were not aligned."
    culprit = findings.culprit
    if culprit.why is Why.NO_WAITS or not findings.causes.costs:
        return _nothing(findings)
    waited_ns = int(findings.waits.wait_ns.sum())
    if culprit.kind is None and 2 * sum(_not_on_record(findings)) > waited_ns:
        return _nothing(findings)
    if culprit.kind is None:
        return f"{_why_open(findings)} {_largest(findings)}"
    return f"{_accuse(culprit)} That costs {part_of(culprit.cost_ns, waited_ns)} of waiting."


def part_of(part_ns: float, whole_ns: float) -> str:
    """ "8.58 of 25.6 ms", or "620 us of 25.6 ms"."""
    part, whole = duration(part_ns), duration(whole_ns)
    same = unit_for(part_ns)[0] == unit_for(whole_ns)[0]
    return f"{part.rsplit(' ', 1)[0] if same else part} of {whole}"


def why_no_rank(findings: Findings) -> str:
    """Says that signals which ended waits were not recorded; "" where all were."""
    unmatched_ns = int(findings.waits.unmatched.sum())
    if not unmatched_ns:
        return ""
    share = percent(unmatched_ns, int(findings.waits.wait_ns.sum()))
    signals = f"the signals that ended {share} of the waits, {duration(unmatched_ns)}"
    return f"no rank can be named: {signals}, are not on record"


def charged(blame: Blame) -> str:
    """A blame with its uncertainty from the clocks, which is often smaller on one side: no wait is below 0."""
    low_ns, high_ns = blame.late_ns - blame.likely.lo_ns, blame.likely.hi_ns - blame.late_ns
    low, high, largest = duration(low_ns), duration(high_ns), max(low_ns, high_ns)
    if low != high and abs(high_ns - low_ns) > _ROUNDING_NS:
        return f"{duration(blame.late_ns)} (-{low} to +{high})"
    return duration(blame.late_ns) + (f" ±{duration(largest)}" if largest > _ROUNDING_NS else "")


def evidence(findings: Findings) -> str:
    """What makes it stand out, and whether the clocks are exact enough; or the figures of the largest causes."""
    culprit = findings.culprit
    if culprit.kind is None:
        told = _figures(findings) or findings.causes.note or "no cause on record"
        return "; ".join([told, *([_and(findings.absent)] if findings.absent else [])])
    first = next(one for one in culprit.suspects if one.kind is culprit.kind and one.member in culprit.members)
    if culprit.event is not None and first.event is not None:
        text = f"{_owns(first)} took {duration(first.event.excess_ns)} longer then than at any other time"
    else:
        text = f"{_owns(first)} {_lead(first)}"
    return "; ".join([text, _certainty(findings), *([_and(findings.absent)] if findings.absent else [])])


def sums(findings: Findings) -> str:
    """All waiting as the sum of what it is charged to, and of what has no cause on record."""
    waited_ns, causes, culprit = int(findings.waits.wait_ns.sum()), findings.causes, findings.culprit
    if not waited_ns:
        return "no waits on record"
    parts: list[tuple[str, float]] = []
    if culprit.kind is not None and culprit.event is None:
        parts.append((_what(culprit), culprit.cost_ns))
    for name, targets in (
        ("gaps before kernels", (Target.HOST, Target.GAP)),
        ("work", (Target.WORK,)),
        ("links", (Target.LINK,)),
    ):
        ns = sum(cost.total_ns for cost in causes.costs if cost.target in targets)
        is_named = bool(parts) and culprit.kind in _KINDS_OF[targets[0]]
        ns -= culprit.cost_ns if is_named else 0.0
        if ns >= 0.5:
            parts.append((f"other {name}" if is_named else name, ns))
    no_cause_ns = uncaused_ns(findings)
    if no_cause_ns >= 0.5 or not parts:
        parts.append((f"without a cause on record ({percent(no_cause_ns, waited_ns)})", no_cause_ns))
    return f"{duration(waited_ns)} = " + " + ".join(f"{duration(ns)} {name}" for name, ns in parts)


_KINDS_OF = {
    Target.HOST: (Kind.HOST, Kind.GAP),
    Target.WORK: (Kind.WORK,),
    Target.LINK: (Kind.LINK,),
}


def _accuse(culprit: Culprit) -> str:
    """The first sentence: who does what."""
    once = "" if culprit.event is None else f" once, in iteration {culprit.event}"
    several = len(culprit.members) > 1
    if culprit.kind is Kind.LINK:
        be = ("were" if several else "was") if once else ("are" if several else "is")
        return f"The {_links(culprit.members)} {be} slow{once}."
    who = ranks(tuple(member[0] for member in culprit.members))
    if culprit.kind is Kind.HOST:
        subject = f"The hosts of {who}" if several else f"{_capital(who)}'s host"
        return f"{subject} {'launched' if once else 'launch' if several else 'launches'} late{once}."
    if culprit.kind is Kind.GAP:
        return f"Kernels of {who} {'began' if once else 'begin'} late{once} ({HOST_OR_KERNEL})."
    be = ("were" if several else "was") if once else ("are" if several else "is")
    return f"{_capital(who)} {be} slow{once}: {culprit.phase}."


def _what(culprit: Culprit) -> str:
    """The same as a part of a sum."""
    if culprit.kind is Kind.LINK:
        return f"the {_links(culprit.members)}"
    who = ranks(tuple(member[0] for member in culprit.members))
    thing = {Kind.HOST: "host", Kind.GAP: "gaps before kernels", Kind.WORK: "work"}[culprit.kind or Kind.WORK]
    return f"{who}'s {thing}" if len(culprit.members) == 1 else f"{thing} of {who}"


def _links(members: tuple[tuple[int, ...], ...]) -> str:
    names = [f"{source} → {destination}" for source, destination in members[:4]]
    more = f" and {len(members) - 4} more" if len(members) > 4 else ""
    if len(names) == 1:
        return f"link {names[0]}"
    return f"links {', '.join(names[:-1])}{',' if more else ' and'} {names[-1]}{more}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _why_open(findings: Findings) -> str:
    culprit, number = findings.culprit, len(findings.iterations)
    if culprit.why is Why.CPU:
        return "No culprit is named: the CPU backend shows order and coverage, never durations of a GPU."
    if culprit.why is Why.CLOCKS:
        late = [one.member[0] for one in culprit.suspects if one.lead.stands_out and one.kind is not Kind.LINK]
        whom = ranks(tuple(dict.fromkeys(late)))
        return f"No culprit is named: the clocks are not exact enough to say whether any rank waited for {whom}."
    if culprit.why is Why.ONE_ITERATION:
        what = f"{count(number, 'iteration')} {'is' if number == 1 else 'are'} on record" if number else "no iteration"
        return f"No culprit is named: {what}, which can be described, not judged."
    times = max((one.lead.num_iterations for one in culprit.suspects), default=number)
    return f"No culprit is named: over {count(times, 'iteration')} no rank and no link stands out by more than chance."


def _largest(findings: Findings) -> str:
    """The second sentence of an open verdict."""
    waited_ns, suspects = int(findings.waits.wait_ns.sum()), findings.culprit.suspects
    if not suspects:
        return f"{duration(waited_ns)} of waiting have no cause that could be one's."
    first = suspects[0]
    return f"The largest cause, {_owns(first)}, costs {part_of(first.cost_ns, waited_ns)} of waiting."


def _not_on_record(findings: Findings) -> tuple[float, int]:
    """(ns charged to nothing that was recorded, ns of waits whose signals were not recorded)"""
    unexplained_ns = sum(cost.total_ns for cost in findings.causes.costs if cost.target is Target.UNEXPLAINED)
    return unexplained_ns, int(findings.waits.unmatched.sum())


def _nothing(findings: Findings) -> str:
    unexplained_ns, unmatched_ns = _not_on_record(findings)
    if 2 * unexplained_ns > unmatched_ns:
        return "No rank can be named: what the ranks waited for is not on record."
    text = why_no_rank(findings) or "no rank made another one wait"
    return _capital("; ".join([text, *findings.absent])) + "."


def _owns(suspect: Suspect) -> str:
    """ "rank 0's gaps before kernels", "rank 3's copy_token", "the link 1 → 6"."""
    if suspect.kind is Kind.LINK:
        return f"the {_links((suspect.member,))}"
    thing = str(suspect.phase) if suspect.kind is Kind.WORK else "gaps before kernels"
    return f"rank {suspect.member[0]}'s {thing}"


def _lead(suspect: Suspect) -> str:
    """How much longer than its peers it takes, and what chance explains."""
    lead = suspect.lead
    if lead.noise_ns != lead.noise_ns:
        return f"{count(lead.num_iterations, 'iteration')} cannot show whether it is unusual"
    verb = "are" if suspect.kind in (Kind.HOST, Kind.GAP) else "is"
    where = "a message than on the other links" if suspect.kind is Kind.LINK else "an iteration than at the other ranks"
    longer = f"{duration(abs(lead.lead_ns))} {'longer' if lead.lead_ns >= 0 else 'shorter'} {where}"
    return f"{verb} {longer} (by chance up to {duration(lead.noise_ns)}, {count(lead.num_iterations, 'iteration')})"


def _figures(findings: Findings) -> str:
    culprit = findings.culprit
    parts = []
    for one in culprit.suspects[:_MAX_SUSPECTS]:
        judged = "" if culprit.why is Why.CPU else f", {_lead(one)}"
        parts.append(f"{_owns(one)}: {duration(one.cost_ns)}{judged}")
    return "; ".join(parts)


def _certainty(findings: Findings) -> str:
    """What the clocks leave of it."""
    culprit = findings.culprit
    if culprit.kind is Kind.LINK:
        return "clocks: within what they leave open" if culprit.is_proven else "not proven"
    named = [blame for blame in findings.causes.blames if (blame.rank,) in culprit.members][:_MAX_SUSPECTS]
    said = " and ".join(f"work and gaps of rank {blame.rank} cost {charged(blame)}" for blame in named)
    if findings.is_contradicted:
        return f"{said}; not proven: waits ended before their signals began, so events or clocks are wrong"
    if findings.absent:
        return f"{said}; not proven: it may have waited for what is not here"
    certainty = "proven by the clock bounds" if culprit.is_proven else "likely, not proven, by the clock bounds"
    return f"{said}, {certainty}"


def _and(texts: list[str]) -> str:
    return " and ".join(texts)
