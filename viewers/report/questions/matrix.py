"""Who waits for whom?"""

from __future__ import annotations

from tracekern.analysis.findings import Findings
from tracekern.analysis.waits.matrix import Abnormal, WaitMatrix, find_abnormal
from tracekern.formatting import count, duration, escape, ranks, sentence
from tracekern.viewers.report.charts import heatmap
from tracekern.viewers.report.frame import Answer, Figure, table
from tracekern.viewers.report.question import Question
from tracekern.viewers.report.verdict import charged, why_no_rank

_ALONE = "There is one rank: it can wait only for itself."
_MAX_NAMED = 8
_MAX_FRAMED = 2


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
    abnormal = find_abnormal(matrix)
    body: list[str | Figure] = [_picture(matrix, abnormal)]
    if abnormal:
        body.append(
            "<ul class='lines'>"
            + "".join(
                f"<li><span class='word'>{_factor(one)}</span><span>{_say(one)}</span></li>"
                for one in abnormal[:_MAX_NAMED]
            )
            + "</ul>"
        )
    body += ["<h3>How long each rank made the others wait</h3>", _blame_table(findings)]
    aside = (
        "Each row is a waiting rank, each column the rank it waits for. A cell sums the waits of all warps, colours "
        "are logarithmic. The diagonal is waiting for warps of the same rank. A row or column is listed if it "
        "is at least 1.25 times, a cell if it is at least 2 times, what the medians of its row and column predict, and "
        "if the excess is more than two clock ticks a wait. The two that cost most are framed."
    )
    return Answer(_answer(findings), body, aside)


QUESTION = Question("matrix", "Matrix", "Who waits for whom?", draw, order=30)


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


def _picture(matrix: WaitMatrix, abnormal: tuple[Abnormal, ...]) -> Figure:
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
    place = {rank: idx for idx, rank in enumerate(matrix.ranks)}
    last = len(matrix.ranks) - 1
    marked = []
    for one in abnormal[:_MAX_FRAMED]:
        top, bottom = (0, last) if one.rank is None else (place[one.rank],) * 2
        left, right = (0, last) if one.peer is None else (place[one.peer],) * 2
        marked.append((top, left, bottom, right))
    names = [str(rank) for rank in matrix.ranks]
    return heatmap(
        names, matrix.sum_ns.tolist(), hover, marked, "Wait time between ranks: rows wait, columns are waited for"
    )


def _factor(one: Abnormal) -> str:
    return f"{one.factor:.1f} x"


def _say(one: Abnormal) -> str:
    excess = f"{duration(one.excess_ns)} above what is expected"
    if one.peer is None:
        return f"rank {one.rank} waits longer than the other ranks for every peer: {excess}"
    if one.rank is None:
        return f"all ranks wait longer for rank {one.peer} than for others: {excess}"
    return f"rank {one.rank} waits for rank {one.peer} longer than either does elsewhere: {excess}"


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
