"""Who waits for whom?"""

from __future__ import annotations

from collections.abc import Sequence

from tracekern.analysis.findings import Findings
from tracekern.analysis.questions.group_waits import GroupWaits
from tracekern.analysis.waits.matrix import WaitMatrix
from tracekern.analysis.why.candidates import Candidate, CauseKind
from tracekern.formatting import count, duration, escape, number_ranges, percent, ranks, sentence
from tracekern.viewers.report.charts import heatmap
from tracekern.viewers.report.frame import Answer, Figure, table
from tracekern.viewers.report.question import Question
from tracekern.viewers.report.verdict import charged, why_no_rank

_ALONE = "There is one rank: it can wait only for itself."
_MAX_NAMED = 8
_MAX_FRAMED = 4
_MAX_GROUPS = 3


def draw(findings: Findings) -> Answer:
    matrix = findings.matrix
    between = int(matrix.sum_ns.sum() - matrix.sum_ns.diagonal().sum())
    absent = "".join(f" {escape(sentence(text))}" for text in findings.absent)
    if len(matrix.ranks) < 2:
        alone = "One rank is here: its waits for others have no place." if absent else _ALONE
        return Answer(alone + absent)
    if not between:
        unknown = why_no_rank(findings)
        answer = escape(sentence(unknown)) if unknown else "No rank waited for another one."
        return Answer(answer + absent)
    named = [cause.candidate for cause in findings.answer.causes]
    body: list[str | Figure] = [_picture(matrix, named)]
    body += ["<h3>How long each rank made the others wait</h3>", _blame_table(findings)]
    if findings.groups:
        body += ["<h3>Waits within each group</h3>", _group_table(findings.groups)]
    aside = (
        "Each row is a waiting rank, each column the rank it waits for. A cell sums the waits of all warps, colours "
        "are logarithmic. The diagonal is waiting for warps of the same rank. Framed are the ranks and links that are "
        "named as causes. A dark cell is no cause: who waits long may hold up nothing."
    )
    return Answer(_answer(findings), body, aside)


QUESTION = Question("matrix", "Matrix", "Who waits for whom?", draw, order=30)


def describe_groups(groups: Sequence[GroupWaits]) -> str:
    """Says how long the ranks of each group waited for each other, and for whom most."""
    parts = []
    for group in groups[:_MAX_GROUPS]:
        whom = f", {percent(group.awaited_ns, group.wait_ns)} of it for rank {group.awaited}" if group.wait_ns else ""
        parts.append(f"{_named(group)} waited {duration(group.wait_ns)} for each other{whom}")
    rest = groups[_MAX_GROUPS:]
    if rest:
        parts.append(f"{count(len(rest), 'more group')}: {duration(sum(group.wait_ns for group in rest))}")
    return "; ".join(parts)


def _named(group: GroupWaits) -> str:
    return f"{group.name} ({ranks(group.ranks)})" if group.name else group.label


def _group_table(groups: Sequence[GroupWaits]) -> str:
    rows = [
        [
            escape(group.name or "-"),
            number_ranges(sorted(group.ranks)),
            duration(group.wait_ns),
            f"rank {group.awaited}, {percent(group.awaited_ns, group.wait_ns)}" if group.wait_ns else "-",
        ]
        for group in groups
    ]
    return table(["group", "ranks", "waits for each other", "most for"], rows, numbers=2)


def _answer(findings: Findings) -> str:
    if not findings.summary.aligned:
        return "Durations of waits hold; <b>who came late cannot be said</b>: the clocks were not aligned."
    verdict = findings.verdict
    if verdict.rank is not None:
        named = next(blame for blame in findings.blames if blame.rank == verdict.rank)
        return f"The others waited longest for <b>rank {verdict.rank}</b>: {charged(named)} until it was there."
    if verdict.candidates:
        return f"The clocks leave open who made the others wait longest: <b>{ranks(verdict.candidates)}</b>."
    unknown = (
        why_no_rank(findings)
        or "no rank came late for another one: what is left is the time of the messages themselves"
    )
    return escape(sentence(unknown))


def _picture(matrix: WaitMatrix, named: list[Candidate]) -> Figure:
    hover = [
        [
            f"rank {waiter} waits for rank {peer}<br>{duration(sum_ns)} in {count(number, 'wait')} (±{duration(doubt)})"
            if sum_ns
            else ""  # empty cells show none, and of many ranks they are most of the page
            for peer, sum_ns, number, doubt in zip(matrix.ranks, *line, strict=True)
        ]
        for waiter, *line in zip(
            matrix.ranks, matrix.sum_ns.tolist(), matrix.count.tolist(), matrix.doubt_ns.tolist(), strict=True
        )
    ]
    marked = [frame for candidate in named for frame in _frames(matrix, candidate)][:_MAX_FRAMED]
    names = [str(rank) for rank in matrix.ranks]
    return heatmap(
        names, matrix.sum_ns.tolist(), hover, marked, "Wait time between ranks: rows wait, columns are waited for"
    )


def _frames(matrix: WaitMatrix, candidate: Candidate) -> list[tuple[int, int, int, int]]:
    """Where a cause is in the matrix, (row, column) to (row, column): others wait for its ranks, or on its links."""
    if candidate.kind is CauseKind.RING:
        return []
    last, place = len(matrix.ranks) - 1, {rank: idx for idx, rank in enumerate(matrix.ranks)}
    one = [place[rank] for rank in candidate.ranks]
    if candidate.kind is CauseKind.LINK:
        return [(place[candidate.peer], one[0], place[candidate.peer], one[0])]
    if candidate.kind is CauseKind.LINKS_IN:
        return [(row, 0, row, last) for row in one]
    return [(0, column, last, column) for column in one]


def _blame_table(findings: Findings) -> str:
    rows = [
        [
            f"rank {blame.rank}",
            duration(blame.late_ns),
            f"{duration(blame.likely.lo_ns)} – {duration(blame.likely.hi_ns)}",
            f"{duration(blame.proven.lo_ns)} – {duration(blame.proven.hi_ns)}",
        ]
        for blame in findings.blames[:_MAX_NAMED]
    ]
    return table(["", "others waited for it", "likely between", "proven between"], rows, numbers=3)
