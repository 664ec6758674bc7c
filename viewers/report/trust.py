"""How far can this be trusted? Clock bounds, losses, what the clocks leave open, versions."""

from __future__ import annotations

import math

from tracekern.analysis.findings import Findings
from tracekern.analysis.summary import RankSummary
from tracekern.viewers.report.frame import Part, table
from tracekern.viewers.report.headlines import trust
from tracekern.viewers.words import count, duration, escape, percent

_MAX_ROWS = 16


def trust_part(findings: Findings) -> Part:
    answer = trust(findings)
    body = [_ranks(findings), _open(findings), _problems(findings), _settings(findings)]
    aside = (
        "Proven bounds follow from round trips alone; repeatable is one standard deviation and assumes that a message "
        "takes as long there as back. Errors of a pair's clocks are the same for all its waits: they add up, they do "
        "not average out."
    )
    return Part(
        "trust", "Trust", "How far can this be trusted?", escape(answer[0].upper() + answer[1:]) + ".", body, aside
    )


def _ranks(findings: Findings) -> str:
    shown = findings.summary.ranks[:_MAX_ROWS]
    rows = [
        [
            f"rank {rank.rank}",
            escape(f"{rank.device} on {rank.node}"),
            escape(_clock(rank)),
            f"{rank.num_spans:,}",
            f"{rank.num_open_spans:,}",
            f"{rank.records_lost:,}",
            escape(rank.state),
        ]
        for rank in shown
    ]
    grid = table(["", "device", "clock", "spans", "never ended", "records lost", "state"], rows, numbers=4)
    rest = len(findings.summary.ranks) - len(shown)
    return grid + (f"<p class='aside'>and {count(rest, 'more rank')}</p>" if rest else "")


def _clock(rank: RankSummary) -> str:
    if rank.clock_method == "reference" or not math.isfinite(rank.clock_hard_ns):
        return rank.clock_method
    return f"{rank.clock_method} ±{duration(rank.clock_hard_ns)} proven, ±{duration(rank.clock_sigma_ns)} repeatable"


def _open(findings: Findings) -> str:
    """The share of the waiting between ranks that the clocks leave undecided."""
    late = sum(blame.late_ns for blame in findings.blames)
    if not late or not findings.summary.aligned:
        return ""
    likely = sum(blame.likely.inconclusive_ns for blame in findings.blames)
    proven = sum(blame.proven.inconclusive_ns for blame in findings.blames)
    return (
        f"<p>Of {duration(late)} that ranks waited for each other to arrive, the clocks leave {percent(likely, late)} "
        f"undecided at their repeatability, {percent(proven, late)} at their proven bounds.</p>"
    )


def _problems(findings: Findings) -> str:
    problems = findings.timeline.problems
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
