"""How far can this be trusted? Clock bounds, losses, overhead, what the clocks leave open, versions."""

from __future__ import annotations

import math

from tracekern.analysis.findings import Findings
from tracekern.analysis.questions.summary import RankSummary
from tracekern.analysis.statistics import probe_cost_ns
from tracekern.formatting import count, duration, escape, percent, sentence
from tracekern.timeline.model import told_once
from tracekern.viewers.report.frame import Answer, table
from tracekern.viewers.report.headlines import TOLD_APART, trust
from tracekern.viewers.report.question import Question

_MAX_ROWS = 16
_SEVERITIES = ("error", "warning", "note")


def draw(findings: Findings) -> Answer:
    answer = trust(findings)
    body = [_ranks(findings), _open(findings), _overhead(findings), _problems(findings), _settings(findings)]
    aside = (
        "Proven bounds follow from round trips and, where those say more, from messages of the kernels, which cannot "
        "arrive before they were sent. Repeatable is one standard deviation and assumes that a message takes as long "
        "there as back. Errors of a pair's clocks are the same for all its waits: they add up, they do not average out."
    )
    return Answer(escape(sentence(answer)), body, aside)


QUESTION = Question("trust", "Trust", "How far can this be trusted?", draw, order=90)


def _ranks(findings: Findings) -> str:
    shown = sorted(sorted(findings.summary.ranks, key=_soundness)[:_MAX_ROWS], key=lambda rank: rank.rank)
    rows = [
        [
            f"rank {rank.rank}",
            escape(f"{rank.device} on {rank.node}"),
            *_clock(rank),
            f"{rank.num_spans:,}",
            f"{rank.num_open_spans:,}",
            f"{rank.records_lost:,}",
            escape(rank.state),
        ]
        for rank in shown
    ]
    columns = ["", "device", "clock", "proven", "repeatable", "spans", "never ended", "records lost", "state"]
    grid = table(columns, rows, numbers=6)
    rest = len(findings.summary.ranks) - len(shown)
    return grid + (f"<p class='aside'>and {count(rest, 'more rank')}; these are the worst</p>" if rest else "")


def _soundness(rank: RankSummary) -> tuple[float, ...]:
    """The least sound first: it died, lost records, left spans open, or its clock is known worst."""
    hard_ns = rank.clock_hard_ns if math.isfinite(rank.clock_hard_ns) else 0.0
    return rank.state == "closed", -rank.records_lost, -rank.num_open_spans, -hard_ns


def _clock(rank: RankSummary) -> list[str]:
    """How the rank's clock was related to the axis, what is proven of it, and how well it repeats."""
    if rank.clock_of_rank != rank.rank:
        return [f"one clock with rank {rank.clock_of_rank}", "-", "-"]
    return [escape(rank.clock_method), escape(_proven(rank)), _bound(rank.clock_sigma_ns)]


def _proven(rank: RankSummary) -> str:
    """The bound, and where it comes from."""
    if rank.clock_method == "reference" or not math.isfinite(rank.clock_hard_ns):
        return "-"
    if rank.clock_round_trip_ns is None:
        return f"{_bound(rank.clock_hard_ns)} by round trips"
    return f"{_bound(rank.clock_hard_ns)} by messages, {_bound(rank.clock_round_trip_ns)} by round trips"


def _bound(value_ns: float) -> str:
    return f"±{duration(value_ns)}" if math.isfinite(value_ns) and value_ns else "-"


def _open(findings: Findings) -> str:
    """The share of the waiting between ranks that the clocks leave undecided."""
    late = sum(blame.late_ns for blame in findings.blames)
    if not late or not findings.summary.aligned:
        return ""
    likely = sum(blame.likely.inconclusive_ns for blame in findings.blames)
    proven = sum(blame.proven.inconclusive_ns for blame in findings.blames)
    return (
        f"<p>Ranks waited {duration(late)} for others to arrive. Clock errors leave open who caused "
        f"{percent(likely, late)} of it at one standard deviation, {percent(proven, late)} at the proven bounds.</p>"
    )


def _overhead(findings: Findings) -> str:
    """What recording took of the warps' time, at the cost of a span that the capture measured."""
    probe_ns = probe_cost_ns(findings.timeline)
    if not probe_ns:
        return "<p>What recording a span costs was not measured in this capture.</p>"
    spans = sum(event.count for rank in findings.summary.ranks for event in rank.events)
    cost_ns = spans * probe_ns
    share = percent(cost_ns, int(findings.time.total.sum()))
    about = "" if share.startswith("<") else "about "
    return (
        f"<p>Recording a span costs {duration(probe_ns)}, measured on this device when the capture "
        f"opened: for {count(spans, 'span')} {about}{share} of the warps' "
        "time.</p>"
    )


def _problems(findings: Findings) -> str:
    # What a launch lost is shown once, not again for each of its tracks; what ended a wait comes first, and of errors
    # those that the summary quotes: there may be one for each track of those that it counts.
    problems = told_once(
        problem for problem in findings.timeline.problems if problem.kind != "lost_records" or problem.track < 0
    )
    problems.sort(key=lambda one: (one.kind != "fault", _SEVERITIES.index(one.severity), one.kind in TOLD_APART))
    if not problems:
        return "<p>The reader met no problem in the capture.</p>"
    rows = [[escape(problem.severity), escape(problem.text)] for problem in problems[:_MAX_ROWS]]
    rest = len(problems) - len(rows)
    more = f"<p class='aside'>and {count(rest, 'more problem')}</p>" if rest else ""
    return f"<h3>Problems</h3>{table(['', 'what the reader met'], rows)}{more}"


def _settings(findings: Findings) -> str:
    """What was run, from the metadata of the first rank."""
    metadata = findings.timeline.ranks[0].metadata if findings.timeline.ranks else {}
    facts = {
        "command": metadata.get("command"),
        "recorded": metadata.get("created"),
        "note": metadata.get("note"),
        "by tracekern": metadata.get("tracekern"),
        "run": metadata.get("run_id"),
        **(metadata.get("settings") or {}),
    }
    rows = [[escape(key), f"<code>{escape(value)}</code>"] for key, value in facts.items() if value not in (None, "")]
    return f"<details><summary>What was run</summary>{table(['', ''], rows)}</details>" if rows else ""
