"""Why did they wait? Root causes: what took longer, at which rank, host or link, and whom it held up."""

from __future__ import annotations

from tracekern.analysis.causes.analyze import Cost
from tracekern.analysis.causes.blame import Chain, Target
from tracekern.analysis.findings import Findings
from tracekern.analysis.waits.analyze import Phase
from tracekern.formatting import count, duration, escape, percent, sentence
from tracekern.viewers.report.charts import stacked_bars, time_scale
from tracekern.viewers.report.frame import Answer, Figure, table
from tracekern.viewers.report.question import Question
from tracekern.viewers.report.verdict import HOST_OR_KERNEL

_MAX_COSTS = 10
_MAX_CHAINS = 6
_TARGET_WORDS = {
    Target.WORK: "work that took longer",
    Target.HOST: "kernels that hosts launched later",
    Target.GAP: "kernels that began later, for their host or an unrecorded kernel",
    Target.LINK: "stores that drained and flags that travelled",
    Target.UNEXPLAINED: "nothing on record",
}


def draw(findings: Findings) -> Answer:
    causes = findings.causes
    if not causes.costs:
        return Answer(escape(sentence(causes.note or "no cause on record")))
    whole = float(causes.charged_ns)
    by_target = {target: sum(cost.total_ns for cost in causes.costs if cost.target is target) for target in Target}
    said = "; ".join(
        f"{percent(ns, whole)} {_TARGET_WORDS[target]}"
        for target, ns in sorted(by_target.items(), key=lambda entry: -entry[1])
        if ns
    )
    first = causes.costs[0]
    answer = (
        f"<b>{escape(describe_cost(first))}</b> caused <b>{percent(first.total_ns, whole)}</b> of {duration(whole)}: "
        f"{duration(first.direct_ns)} in waits for that rank itself, {duration(first.passed_on_ns)} in waits for ranks "
        f"and warps that it had delayed. By kind: {said}. {_without_cause(findings)}"
    )
    body: list[str | Figure] = [_cost_bars(findings)]
    if causes.chains:
        body += ["<h3>The longest chains</h3>", _chain_table(findings)]
    aside = (
        "A wait is charged to what its source spent more time on than the waiter since they last synchronized. Where "
        "the source had to wait itself, that part is passed on to the causes of those waits. All charges add up to the "
        f"waits. {_taken_out(causes.num_taken_out)}Chains follow the largest share at each step. "
        f"They were built from {duration(causes.chained_ns)} of lateness."
    )
    return Answer(answer, body, aside)


QUESTION = Question("cause", "Cause", "Why did they wait?", draw, order=40)


def uncaused_ns(findings: Findings) -> float:
    """Waiting without a cause on record: what is not charged, and what is charged to nothing that was recorded."""
    causes = findings.causes
    unexplained = sum(cost.total_ns for cost in causes.costs if cost.target is Target.UNEXPLAINED)
    return int(findings.waits.wait_ns.sum()) - causes.charged_ns + unexplained


def describe_cost(cost: Cost) -> str:
    """ "the host of rank 0", "rank 3: combine_send.send_result", "the link 0 → 3"."""
    return _place(cost.rank, cost.target, cost.phase, cost.peer)


def _place(rank: int, target: Target, phase: Phase, peer: int) -> str:
    owner = f"rank {rank}" if rank >= 0 else "an unknown rank"
    if target is Target.HOST:
        return f"the host of {owner}"
    if target is Target.GAP:
        return f"before kernels of {owner} ({HOST_OR_KERNEL})"
    if target is Target.LINK and peer >= 0:
        return f"the link {rank} → {peer}"
    if target is Target.LINK:
        return f"{owner}: stores of {phase}" if phase.event else f"{owner}: its link"
    if target is Target.WORK:
        return f"{owner}: {phase}"
    return f"{owner}: unexplained"


def _taken_out(number: int) -> str:
    if not number:
        return ""
    return f"{count(number, 'cause')} that took longer than at the peers cost what a replay of the run without saved. "


def _without_cause(findings: Findings) -> str:
    """How much of the waiting is charged, and what the rest is."""
    waits, causes = findings.waits, findings.causes
    waited, not_charged = int(waits.wait_ns.sum()), int(waits.wait_ns.sum()) - causes.charged_ns
    if not not_charged:
        return "All waiting is charged."
    parts = {
        "in barriers after the last one had come, or for nothing that names a channel": int(waits.completion.sum()),
        "for signals that are not on record": int(waits.unmatched.sum()),
    }
    rest = not_charged - sum(parts.values())
    parts["in other waits"] = max(rest, 0)
    said = ", ".join(f"{duration(ns)} {what}" for what, ns in parts.items() if ns)
    return f"{percent(not_charged, waited)} of the {duration(waited)} of waiting is not charged: {said}."


def _cost_bars(findings: Findings) -> Figure:
    costs = findings.causes.costs[:_MAX_COSTS]
    unit, size = time_scale([cost.total_ns for cost in costs])
    parts = [
        ("direct", "--direct", "", [cost.direct_ns / size for cost in costs]),
        ("passed on", "--passed", "/", [cost.passed_on_ns / size for cost in costs]),
    ]
    hover = [
        [f"{escape(describe_cost(cost))}<br>direct: {duration(cost.direct_ns)}" for cost in costs],
        [f"{escape(describe_cost(cost))}<br>passed on: {duration(cost.passed_on_ns)}" for cost in costs],
    ]
    rows = [describe_cost(cost) for cost in costs]
    return stacked_bars(
        rows, parts, axis=f"{unit} of waiting, over all warps", says="Waiting by root cause", hover=hover
    )


def _chain_table(findings: Findings) -> str:
    chains = findings.causes.chains[:_MAX_CHAINS]
    rows = [[duration(chain.late_ns), f"{chain.num_waits:,}", _chain(chain)] for chain in chains]
    rest = len(findings.causes.chains) - len(chains)
    more = f"<p class='aside'>and {count(rest, 'more chain')}</p>" if rest else ""
    return table(["lateness", "waits", "who waited, for whom, and what lay at the end"], rows) + more


def _chain(chain: Chain) -> str:
    steps = [f"<code>rank {rank} {escape(phase)}</code>" for rank, phase in chain.waiters]
    steps += ["…"] * chain.is_cut
    return " ← ".join([*steps, f"<b>{escape(_place(chain.rank, chain.target, chain.phase, -1))}</b>"])
