"""A cause in words: who takes longer, at what, and when."""

from __future__ import annotations

from tracekern.analysis.graph.program import BETWEEN_SPANS, NOT_STARTED
from tracekern.analysis.waits.analyze import Phase
from tracekern.analysis.why.answer import Answer, Cause, Incident
from tracekern.analysis.why.candidates import Candidate, CauseKind, Excess
from tracekern.analysis.why.chance import Pattern
from tracekern.formatting import count, duration, factor, number_ranges, percent

HOST_OR_KERNEL = "host or an unrecorded kernel"
"""What a gap before a kernel may be where nothing says that it was the host."""
_THINGS = {
    CauseKind.PACE: "slower work",
    CauseKind.AMOUNT: "additional work",
    CauseKind.EXTRA: "extra work",
    CauseKind.HOST: "gaps before kernels",
    CauseKind.LINKS_OUT: "links to others",
    CauseKind.LINKS_IN: "links from others",
}


def accuse(cause: Cause) -> str:
    """What the cause does, as a sentence."""
    candidate, excess = cause.candidate, cause.excess
    if candidate.kind is CauseKind.RING:
        slots = f", which have {count(excess.slots, 'slot')}," if excess.slots else ""
        where = "within the rank" if candidate.peer == candidate.rank else f"at rank {candidate.peer}"
        longest = f"longest those of rank {candidate.rank} ({duration(excess.ns)} in all, {where})"
        return f"The rings of channel {candidate.channel}{slots} are too small: warps wait for room, {longest}."
    when = describe_pattern(cause.finding.pattern) if cause.finding else ""
    many, who = len(candidate.ranks) > 1, name_ranks(candidate)
    subject = f"{who[0].upper()}{who[1:]}"
    if candidate.kind.is_of_links:
        return f"Messages on {_links(candidate)} take {duration(excess.ns)} longer than on other links{when}."
    if candidate.kind is CauseKind.HOST:
        gaps = (
            f"gaps before kernels of {who.removesuffix(',')}" if many and not cause.is_host else "gaps before kernels"
        )
        than = "those of other ranks" if many else "its peers'"
        longer = f"{gaps} are {duration(excess.ns)} longer than {than}{when}, most before {excess.stage}"
        if cause.is_host:
            late = f"The hosts of {who} are late: their" if many else f"{subject}'s host is late: its"
            return f"{late} {longer}."
        whose = "The" if many else f"{subject}'s"
        return f"{whose} {longer} ({HOST_OR_KERNEL})."
    if candidate.kind is CauseKind.EXTRA:
        return f"{subject} alone runs {_own_work(excess)}{when}."
    if candidate.kind is CauseKind.AMOUNT:
        what = f": {factor(excess.factor)} as many {excess.phase} as a peer" if excess.phase else ""
        return f"{subject} {'have' if many else 'has'} more work{when}{what}."
    if excess.warp is not None:
        subject = f"Warp {excess.warp[1]} of block {excess.warp[0]} of {who}"
    return f"{subject} {'are' if many else 'is'} slow{when}{_at_what(excess)}."


def name_candidate(candidate: Candidate, is_host: bool = False) -> str:
    """ "rank 3's slower work", "the gaps before kernels of ranks 0-3, all of node n0", "the link 0 → 3"."""
    if candidate.kind is CauseKind.LINK:
        return f"the {_link(candidate)}"
    if candidate.kind is CauseKind.RING:
        return f"the size of the rings {candidate.channel}"
    thing = "host" if is_host else _THINGS[candidate.kind]
    who = name_ranks(candidate).removesuffix(",")
    return f"the {thing}{'s' * is_host} of {who}" if candidate.others else f"{who}'s {thing}"


def name_ranks(candidate: Candidate) -> str:
    """ "rank 3", "ranks 8-15, all of node n1"."""
    numbers = sorted(candidate.ranks)
    node = f", all of node {candidate.node}," if candidate.node else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {number_ranges(numbers)}{node}"


def describe_incident(answer: Answer, incident: Incident) -> str:
    """ "iterations 13 and 37: rank 6's slower work, 198 us, 24 % of the run"."""
    numbers = [str(number) for number in incident.iterations]
    listed = " and ".join(filter(None, (", ".join(numbers[:-1]), numbers[-1])))
    where = f"iteration{'s' if len(numbers) > 1 else ''} {listed}"
    share = f"{duration(incident.saving.whole_ns)}, {percent(incident.saving.whole_ns, answer.makespan_ns)} of the run"
    return f"{where}: {name_candidate(incident.candidate)}, {share}"


def describe_half(cause: Cause, num_ranks: int) -> str:
    """ "8 of 16 ranks (8-15) differ from the others by their slower work"."""
    ranks = sorted(cause.candidate.ranks)
    whose = f"{len(ranks)} of {count(num_ranks, 'rank')} ({number_ranges(ranks)})"
    return f"{whose} differ from the others by their {_THINGS[cause.candidate.kind]}"


def describe_pattern(pattern: Pattern) -> str:
    """ " from iteration 12 on", " in every 3rd iteration from 1 on"; "" for all."""
    if pattern.stride > 1:
        nth = {2: "2nd", 3: "3rd"}.get(pattern.stride, f"{pattern.stride}th")
        return f" in every {nth} iteration from {pattern.begin} on"
    if pattern.until:
        return f" until iteration {pattern.until - 1}"
    return f" from iteration {pattern.begin} on" if pattern.begin else ""


def describe_phase(phase: Phase) -> str:
    """ "dispatch.copy_token", "between the spans of dispatch"."""
    outside = {BETWEEN_SPANS: "between the spans of", NOT_STARTED: "before the first span of"}
    return f"{outside[phase.event]} {phase.stage or 'no kernel'}" if phase.event in outside else str(phase)


def _own_work(excess: Excess) -> str:
    """ "dispatch.log_stats"; the kernel alone, where it is time outside of its spans."""
    if excess.phase is None:
        return "what no other rank does"
    return excess.phase.stage if excess.phase.event in (BETWEEN_SPANS, NOT_STARTED) else str(excess.phase)


def _at_what(excess: Excess) -> str:
    if excess.phase is None:
        return ""
    if excess.between is not None:
        before, after = excess.between
        where = f"between {before} and {after}" if before else f"before {after}"
        return f": time passes {where} in {excess.phase.stage or 'no kernel'}"
    return f": each {excess.phase} takes {factor(excess.factor)} as long as at a peer"


def _link(candidate: Candidate) -> str:
    return f"link {candidate.rank} → {candidate.peer}"


def _links(candidate: Candidate) -> str:
    if candidate.kind is CauseKind.LINK:
        return f"the {_link(candidate)}"
    return f"all links {'out of' if candidate.kind is CauseKind.LINKS_OUT else 'into'} {name_ranks(candidate)}"
