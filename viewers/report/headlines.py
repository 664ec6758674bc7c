"""The first answer, in six lines or a few more, for the terminal and the top of the page."""

from __future__ import annotations

from dataclasses import dataclass

from tracekern.analysis.findings import Findings
from tracekern.analysis.left_out import left_out
from tracekern.analysis.questions.hang import Holder, OpenWait
from tracekern.analysis.questions.recording import LAUNCH_NS
from tracekern.analysis.questions.summary import Summary
from tracekern.formatting import count, duration, factor, number_ranges, percent, ranks
from tracekern.timeline.clocks.pairs import MAX_WANDER_PER_NS
from tracekern.timeline.decode.dense_probes import MAX_PROBE_SHARE
from tracekern.timeline.fault import fault_of
from tracekern.timeline.model import ABSENT_KINDS, shared_gpus, told_once
from tracekern.viewers.report.held_up import describe_waits
from tracekern.viewers.report.questions.matrix import describe_groups
from tracekern.viewers.report.questions.nodes import describe_nodes
from tracekern.viewers.report.questions.path import describe_part
from tracekern.viewers.report.questions.receive import describe_received
from tracekern.viewers.report.questions.time import describe_ring, named_rings
from tracekern.viewers.report.questions.transfers import describe_transfers
from tracekern.viewers.report.stage_grid import describe_idle
from tracekern.viewers.report.verdict import ON_CPU, evidence, following, part_of, verdict

TOLD_APART = (*ABSENT_KINDS, "lost_records", "open_span", "open_work", "salvaged", "fault", "left_out_profile_event")
"""Kinds of errors that the lines count, or describe themselves."""


@dataclass(frozen=True)
class Line:
    word: str
    text: str


def headlines(findings: Findings) -> list[Line]:
    """One line each: what costs most, why that is said, what is next, of which part all that is, where warps wait and
    kernels stand, what bounds the time, how far to trust it.

    Ranks that died come first, then a wait that exceeded its time limit, or else waits that never ended. What experts
    received is told of captures that say so. Where the times are damaged that is all, with what ended a wait.
    """
    if findings.damage:
        return [*_fault(findings), Line("verdict", f"No figure is given: {findings.damage}")]
    said, why, next_cost, part = verdict(findings), evidence(findings), following(findings), part_of(findings)
    return [
        *_died(findings),
        *(_fault(findings) or _hang(findings)),
        Line("verdict", said),
        *([Line("why", why)] if why else []),
        *([Line("next", next_cost)] if next_cost else []),
        *([Line("part", part)] if part else []),
        Line("waiting", _waiting(findings)),
        *([Line("groups", describe_groups(findings.groups))] if findings.groups else []),
        *([Line("nodes", describe_nodes(findings.nodes))] if findings.nodes else []),
        *([Line("idle", describe_idle(findings.stages))] if findings.stages.stages else []),
        *_transfers(findings),
        Line("bound", _bound(findings)),
        *_receive(findings),
        Line("trust", trust(findings, said)),
    ]


def _died(findings: Findings) -> list[Line]:
    """Which ranks died, by what, and where they were then."""
    dead: dict[tuple[str, str], list[int]] = {}
    for death in findings.deaths:
        dead.setdefault((death.killed_by, _where(death.then)), []).append(death.then.rank)
    parts = [f"{ranks(sorted(of))} {_how(by, len(of))} {where}" for (by, where), of in [*dead.items()][:3]]
    if rest := [rank for of in [*dead.values()][3:] for rank in of]:
        parts.append(f"{ranks(rest)} died, too")
    return [Line("died", "; ".join(parts))] if parts else []


def _how(killed_by: str, num_ranks: int) -> str:
    verb = "was" if num_ranks == 1 else "were"
    return f"{verb} killed by {killed_by}" if killed_by else "ended without closing the capture (killed or crashed)"


def _where(then: Holder) -> str:
    if then.doing:
        return f"in {then.doing}"
    return f"outside recorded kernels, after {then.last_stage}" if then.last_stage else "before any recorded kernel"


def _fault(findings: Findings) -> list[Line]:
    """The wait that exceeded its limit first, then what the other ranks waited for: those waits were ended by it."""
    faulty = [rank for rank in findings.timeline.ranks if rank.metadata.get("fault_text")]
    if not faulty or not findings.held_up:
        return []
    first = min(faulty, key=lambda rank: not ((fault := fault_of(rank)) and fault.is_timeout))
    return [Line("fault", "; ".join([first.metadata["fault_text"], *describe_waits(findings.held_up, first.rank)]))]


def _hang(findings: Findings) -> list[Line]:
    """Waits that never ended. Those that deaths cut short are no hang; where nobody saw the ranks die, they may be."""
    hang = findings.hang
    word = "open" if findings.deaths and not findings.held_up else "hang"
    if hang is None or (word == "open" and not hang.at_least):
        return []
    within = hang.longest.peer == hang.longest.rank
    at_least = "at least " if hang.at_least else ""
    parts = [
        f"rank {hang.longest.rank} has waited {at_least}{duration(hang.longest.lasts_ns)} {_waits_for(hang.longest)}"
    ]
    if hang.num_waits > 1:
        parts.append(f"{hang.num_waits:,} waits of {ranks(hang.ranks)} have not ended")
    if not hang.holders or hang.longest.sent_ns is not None:  # else the holders say more
        parts += [f"rank {wait.rank} waits {_waits_for(wait)}" for wait in hang.others[:3]]
    told = {wait.rank for wait in (hang.longest, *hang.others[:3]) if wait.sent_ns is not None}
    holders = [holder for holder in hang.holders if holder.rank not in told]
    return [Line(word, "; ".join(parts + [_what_holds(holder, within) for holder in holders[:3]]))]


def _waits_for(wait: OpenWait) -> str:
    whom = "another warp of its own" if wait.peer == wait.rank else f"rank {wait.peer}"
    text = f"for {whom} ({' '.join(filter(None, (wait.phase, wait.fields)))})"
    if wait.sent_ns is None:
        return text
    return f"{text}, sent {duration(wait.sent_ns)} ago; the waiter has not seen it (stopped, or it does not run)"


def _what_holds(holder: Holder, within: bool) -> str:
    """What the rank does that others wait for. `within`: its own warps wait for it."""
    name = f"rank {holder.rank}"
    if within and not holder.num_warps:
        return f"{name} is in no other span"
    if not holder.is_known:
        return f"{name} is not in this capture"
    if holder.doing:
        return f"{name} is in {holder.doing}" + (f" ({count(holder.num_warps, 'warp')})" if holder.num_warps else "")
    if not holder.last_stage:
        return f"{name} has run no kernel"
    return f"{name} runs no kernel; its last, {holder.last_stage}, ended {duration(holder.idle_ns)} ago"


def _waiting(findings: Findings) -> str:
    wait, total = int(findings.time.wait.sum()), int(findings.time.total.sum())
    unfinished = sum(rank.num_open_spans for rank in findings.summary.ranks)
    if not total and unfinished:
        return f"no span of a kernel has ended, {count(unfinished, 'span')} began: there is nothing to say about time"
    if not total:
        counted = [problem.text for problem in findings.timeline.problems if problem.kind == "counted_only"]
        return "; ".join(["no kernel left a span: there is nothing to say about time", *counted[:1]])
    if not findings.phases:
        return f"no waits on record; the warps' {duration(total)} went into other spans"
    worst = findings.phases[0]
    all_waits = sum(phase.sum_ns for phase in findings.phases)
    without = left_out(findings.timeline)
    return (
        f"{percent(wait, total)} of the warps' time, {duration(wait)} of {duration(total)}; "
        f"most in {worst.phase}: {duration(worst.sum_ns)}, {percent(worst.sum_ns, all_waits)} of all waits"
        + _endless(findings)
        + (f"; left out: {without}" if without else "")
        + "".join(f"; {describe_ring(ring)}" for ring in named_rings(findings))
    )


def _transfers(findings: Findings) -> list[Line]:
    waits = findings.transfers
    return (
        [Line("transfers", describe_transfers(waits, findings.transfer_blames))]
        if waits is not None and len(waits)
        else []
    )


def _receive(findings: Findings) -> list[Line]:
    received = findings.received
    return [Line("receive", describe_received(received, findings.balance.joined))] if received else []


def _endless(findings: Findings) -> str:
    """How much of the waiting is in waits that never ended; "" where all did."""
    totals = findings.wait_totals
    if not totals.num_endless:
        return ""
    return f"; {duration(totals.endless_ns)} in {count(totals.num_endless, 'wait')} that never ended"


def _bound(findings: Findings) -> str:
    whole = findings.critical_path.whole
    if whole is None or not whole.parts:
        return findings.critical_path.note or "there is no path"
    first = whole.parts[0]
    of_what_ended = "of what ended, " if findings.held_up else ""
    text = (
        f"{of_what_ended}{percent(first.time_ns, whole.makespan_ns)} of the critical path, "
        f"which is {duration(whole.makespan_ns)} long, is {describe_part(first)}"
    )
    return text + _one_iteration(findings)


def _one_iteration(findings: Findings) -> str:
    """How to leave out an iteration, or start-up and the first, that is more than half of the capture, and so of every
    number."""
    whole, iterations = findings.critical_path.whole, findings.critical_path.iterations
    if whole is None or len(iterations) < 2:
        return ""
    place, longest = max(enumerate(iterations), key=lambda found: found[1].end_ns - found[1].start_ns)
    name = f"iteration {longest.iteration} is" if longest.iteration else "the first iteration is"
    them, share_ns = "it", longest.makespan_ns
    if share_ns * 2 <= whole.makespan_ns and iterations[0].start_ns > whole.start_ns:
        place, longest = 0, iterations[0]
        name, them, share_ns = "start-up and the first iteration are", "them", whole.length_until(longest.end_ns)
    if share_ns * 2 <= whole.makespan_ns:
        return ""
    if longest.start_ns < whole.start_ns or longest.end_ns > whole.end_ns:
        return ""  # of a window that cuts it
    if place < len(iterations) / 2:
        first_us, last_us = longest.end_ns // 1000 + 1, whole.end_ns // 1000 + 1
    else:
        first_us, last_us = max(0, whole.start_ns // 1000), (longest.start_ns - 1) // 1000
    share = percent(share_ns, whole.makespan_ns)
    return f"; {name} {share} of it: --window {first_us}us:{last_us}us leaves {them} out"


def steadiness(findings: Findings) -> str:
    if not findings.timeline.has_one_axis:
        return "the clocks were not aligned: how long an iteration took cannot be said"
    if not len(findings.iterations):
        return "no whole iteration on record"
    if len(findings.iterations) == 1:
        return f"one iteration, {duration(int(findings.iterations.duration_ns[0]))}: nothing to compare it with"
    best, median, worst = (int(findings.iterations.duration_ns[row]) for row in findings.iterations.best_median_worst())
    return (
        f"{count(len(findings.iterations), 'iteration')}: median {duration(median)}, "
        f"best {duration(best)}, worst {duration(worst)}, {factor(worst / max(median, 1))} the median"
    )


def trust(findings: Findings, said: str = "") -> str:
    """said: the verdict, where it stands above. What it says of the CPU backend is not repeated."""
    summary = findings.summary
    lost = sum(rank.records_lost for rank in summary.ranks)
    salvaged = [rank.rank for rank in summary.ranks if rank.state == "salvaged"]
    errors = _other_errors(findings)
    nothing_lost = [] if errors else ["no record lost"]
    parts = [
        *findings.absent,
        *errors,
        *(
            problem.text
            for problem in told_once(findings.timeline.problems)
            if problem.kind == "left_out_profile_event"
        ),
        clocks(findings),
        *([f"{count(lost, 'record')} lost"] if lost else nothing_lost),
    ]
    if overwritten := findings.records_overwritten:
        parts.append(f"{overwritten:,} older ones overwritten, as a flight recorder does")
    if salvaged:
        parts.append(f"{ranks(salvaged)} died")
    if findings.wait_totals.num_open:
        parts.append(f"{count(findings.wait_totals.num_open, 'wait')} never ended")
    others = sum(rank.num_open_spans for rank in summary.ranks) - findings.wait_totals.num_open
    if others > 0:
        parts.append(f"{count(others, 'other span' if findings.wait_totals.num_open else 'span')} never ended")
    parts += [problem.text for problem in findings.timeline.problems if problem.kind in ("attempts", "group")]
    parts += [
        f"ranks {number_ranges(of)} share one GPU: the order in which it begins their kernels is held against nobody"
        for of in shared_gpus(findings.timeline.ranks)
    ]
    if (recording := findings.recording) and recording.share > MAX_PROBE_SHARE:
        each = duration(recording.total_ns // recording.num_gaps)
        parts.append(
            f"recording, at {duration(LAUNCH_NS)} a launch, takes about {percent(recording.share, 1)} of the {each} "
            "in which GPUs wait for their hosts: record fewer launches (every=N), or put them in a graph"
        )
    if any(rank.backend == "cpu" for rank in summary.ranks) and ON_CPU not in said:
        parts.append("made on the CPU backend: order and coverage, never GPU durations")
    return "; ".join(parts)


def _other_errors(findings: Findings) -> list[str]:
    """The first error that trust() does not describe itself, and how many more there are."""
    errors = [
        problem.text
        for problem in told_once(findings.timeline.problems)
        if problem.severity == "error" and problem.kind not in TOLD_APART
    ]
    if not errors:
        return []
    return [errors[0] + (f" (and {count(len(errors) - 1, 'more error')})" if len(errors) > 1 else "")]


def clocks(findings: Findings) -> str:
    summary = findings.summary
    if not summary.aligned:
        return "clocks UNALIGNED: times of different ranks cannot be compared"
    if len({rank.clock_of_rank for rank in summary.ranks}) == 1:
        return "one clock"
    bounds = [rank.clock_hard_ns for rank in summary.ranks if rank.clock_hard_ns == rank.clock_hard_ns]
    sigmas = [rank.clock_sigma_ns for rank in summary.ranks if rank.clock_sigma_ns == rank.clock_sigma_ns]
    if not bounds:
        return "clocks of unknown quality"
    text = f"clocks within ±{duration(max(bounds))} proven, ±{duration(max(sigmas, default=float('nan')))} repeatable"
    return text + _clock_doubts(summary)


def _clock_doubts(summary: Summary) -> str:
    """What samples or messages contradict of the clocks, and what is assumed of those that neither checks."""
    text = ""
    if doubted := [rank for rank in summary.ranks if rank.clock_doubt_ns > 0]:
        worst_ns = max(rank.clock_doubt_ns for rank in doubted)
        named = ranks([rank.rank for rank in doubted])
        text = f"; {named} likely off by up to {duration(worst_ns)}: samples or messages contradict the clock"
    if not all(rank.clock_is_checked for rank in summary.ranks):
        text += f"; assumed that no clock jumps or changes its rate by more than {MAX_WANDER_PER_NS * 1e15:g} ppm/s"
    return text
