"""The page of `tracekern diff`: two captures side by side. What differs; whether it would again, a gate says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracekern import __version__
from tracekern.analysis.difference import Difference
from tracekern.analysis.findings import Findings
from tracekern.analysis.statistics import PhaseStatistics, RunStatistics
from tracekern.formatting import count, duration, escape, growth, metric_value, percent, sentence
from tracekern.viewers.report.causes import name_candidate
from tracekern.viewers.report.charts import grouped_bars, stacked_bars, time_scale
from tracekern.viewers.report.frame import Answer, Part, render, table
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.questions.time import TIME_PARTS

_MAX_PHASES = 14
_MAX_COSTS = 8


@dataclass(frozen=True)
class Side:
    name: str
    """Where the capture is."""
    findings: Findings
    statistics: RunStatistics


def diff_page(sides: tuple[Side, Side], differences: Sequence[Difference], warnings: Sequence[str], caveat: str) -> str:
    """The page as HTML. `warnings`: what makes the two less comparable than they look. `caveat`: what one run a side
    cannot say. Raises BadInput where plotly is not installed."""
    parts = [_summary(sides, caveat), _time(sides), _phases(sides), _causes(sides), _metrics(differences)]
    lead = f"<p>A: {escape(sides[0].name)}<br>B: {escape(sides[1].name)}</p>"
    lead += "".join(f"<p class='warn'>{escape(warning)}</p>" for warning in warnings)
    return render(_title(sides), lead, parts, f"tracekern {__version__}")


def _title(sides: tuple[Side, Side]) -> str:
    """The names of the two folders, where they differ: many pages may be open."""
    names = [Path(side.name).name for side in sides]
    return "A and B" if names[0] == names[1] else " and ".join(names)


def _summary(sides: tuple[Side, Side], caveat: str) -> Part:
    ours, theirs = ({line.word: line.text for line in headlines(side.findings)} for side in sides)
    words = list(ours)
    for place, word in enumerate(theirs):
        if word not in words:  # behind what it follows on its own side
            words.insert(words.index(list(theirs)[place - 1]) + 1 if place else 0, word)
    rows = [
        [
            f"<span class='word'>{word}</span>",
            f"<b>A</b> {escape(ours.get(word, '-'))}<br><b>B</b> {escape(theirs.get(word, '-'))}",
        ]
        for word in words
    ]
    answer = f"{_end_to_end(sides)} {escape(sentence(caveat))}"
    return Part("summary", "Summary", "What is different?", Answer(answer, [table(["", ""], rows)]))


def _end_to_end(sides: tuple[Side, Side]) -> str:
    first, second = (side.statistics.metrics().get("end_to_end.p50") for side in sides)
    if first is None or second is None:
        return "The time of an iteration is not known on both sides."
    return (
        f"An iteration takes <b>{duration(first)}</b> in A, <b>{duration(second)}</b> in B ({_change(first, second)})."
    )


def _time(sides: tuple[Side, Side]) -> Part:
    totals = [side.findings.time.total.sum() for side in sides]
    parts, hover = [], []
    for name, color, pattern in TIME_PARTS:
        values, label = [int(getattr(side.findings.time, name).sum()) for side in sides], name.replace("_", " ")
        if not any(values):
            continue
        parts.append(
            (label, color, pattern, [100 * ns / max(1, total) for ns, total in zip(values, totals, strict=True)])
        )
        hover.append([f"{side}: {label}<br>{duration(ns)}" for side, ns in zip("AB", values, strict=True)])
    figure = stacked_bars(
        ["A", "B"], parts, axis="share of the warps' time", says="Shares of work and wait", is_share=True, hover=hover
    )
    waits = [int(side.findings.time.wait.sum()) for side in sides]
    answer = (
        f"The warps waited <b>{percent(waits[0], totals[0])}</b> of their time in A, "
        f"<b>{percent(waits[1], totals[1])}</b> in B."
    )
    return Part("time", "Time", "Work or wait?", Answer(answer, [figure]))


def _phases(sides: tuple[Side, Side]) -> Part:
    question = "Which phases take longer?"
    ours, theirs = ({phase.name: phase for phase in side.statistics.phases} for side in sides)
    names = sorted({*ours, *theirs}, key=lambda name: -max(_total(ours.get(name)), _total(theirs.get(name))))
    if not names:
        return Part("phases", "Phases", question, Answer("No phase is on record."))
    longer = _longer(ours, theirs)
    named = [b.name for _, b in longer[:1]]
    shown = [name for name in names if name in {*names[:_MAX_PHASES], *named}]
    medians = [[phase.p50_ns if (phase := side.get(name)) else 0.0 for name in shown] for side in (ours, theirs)]
    unit, size = time_scale([value for side in medians for value in side])
    bars = [
        (side, color, pattern, [value / size for value in values], [duration(value) for value in values])
        for side, color, pattern, values in zip("AB", ("--work", "--wait"), ("", "/"), medians, strict=True)
    ]
    figure = grouped_bars(shown, bars, axis=f"median of a span, {unit}", says="Median duration of each phase, A and B")
    rows = [
        [
            f"<code>{escape(name)}</code>",
            *_pair(ours.get(name), theirs.get(name), "p50_ns"),
            *_pair(ours.get(name), theirs.get(name), "p99_ns"),
        ]
        for name in shown
    ]
    columns = ["phase", "A p50", "B p50", "", "A p99", "B p99", ""]
    aside = "Medians and 99th percentiles over the spans of all ranks, largest total first."
    answer = Answer(_say_longer(longer, len(ours.keys() & theirs)), [figure, table(columns, rows, numbers=6)], aside)
    return Part("phases", "Phases", question, answer)


def _longer(
    ours: Mapping[str, PhaseStatistics], theirs: Mapping[str, PhaseStatistics]
) -> list[tuple[PhaseStatistics, PhaseStatistics]]:
    """The phases with a higher median in B, in A and in B; first the one that adds most over all its spans."""
    longer = [(ours[name], b) for name, b in theirs.items() if name in ours and b.p50_ns > ours[name].p50_ns]
    return sorted(longer, key=lambda pair: (pair[0].p50_ns - pair[1].p50_ns) * pair[1].num_spans)


def _say_longer(longer: list[tuple[PhaseStatistics, PhaseStatistics]], num_both: int) -> str:
    if not num_both:
        return "No phase is in both."
    text = f"{len(longer)} of {count(num_both, 'phase')} {'has' if len(longer) == 1 else 'have'} a higher median in B"
    if not longer:
        return f"{text}."
    a, b = longer[0]
    return (
        f"{text}; most over all its spans <b>{escape(b.name)}</b>: {duration(a.p50_ns)} to {duration(b.p50_ns)} "
        f"({_change(a.p50_ns, b.p50_ns)})."
    )


def _causes(sides: tuple[Side, Side]) -> Part:
    ours, theirs = (
        {name_candidate(cost.candidate): max(cost.saving.whole_ns, 0.0) for cost in side.findings.answer.costs}
        for side in sides
    )
    names = sorted({*ours, *theirs}, key=lambda name: -max(ours.get(name, 0), theirs.get(name, 0)))[:_MAX_COSTS]
    question = "What costs the run time?"
    if not names:
        notes = {side.findings.answer.note for side in sides if side.findings.answer.note}
        why = f": {escape('; '.join(sorted(notes)))}" if notes else ""
        return Part("cause", "Cause", question, Answer(f"What a cause costs cannot be said on either side{why}."))
    unit, size = time_scale([side.get(name, 0) for name in names for side in (ours, theirs)])
    bars = [
        (
            side,
            color,
            pattern,
            [values.get(name, 0) / size for name in names],
            [duration(values.get(name, 0)) for name in names],
        )
        for side, color, pattern, values in zip("AB", ("--work", "--wait"), ("", "/"), (ours, theirs), strict=True)
    ]
    axis = f"{unit} that the run would be shorter without"
    figure = grouped_bars(names, bars, axis=axis, says="What the run would save without each cause, A and B")
    answer = f"The largest cost goes from {duration(ours.get(names[0], 0))} to {duration(theirs.get(names[0], 0))}: "
    return Part("cause", "Cause", question, Answer(f"{answer}<b>{escape(names[0])}</b>.", [figure]))


def _metrics(differences: Sequence[Difference]) -> Part:
    rows = [
        [
            f"<code>{escape(one.metric)}</code>",
            _show(one.metric, one.first),
            _show(one.metric, one.second),
            _change(one.first, one.second),
        ]
        for one in differences
    ]
    body = [f"<details><summary>all numbers</summary>{table(['metric', 'A', 'B', ''], rows, numbers=3)}</details>"]
    answer = Answer("Every number that tracekern check compares.", body)
    return Part("metrics", "Numbers", "What can a gate hold?", answer)


def _total(phase: PhaseStatistics | None) -> int:
    return phase.total_ns if phase else 0


def _pair(a: PhaseStatistics | None, b: PhaseStatistics | None, field: str) -> list[str]:
    first, second = (getattr(phase, field) if phase else math.nan for phase in (a, b))
    return [*("-" if math.isnan(value) else duration(value) for value in (first, second)), _change(first, second)]


def _change(first: float, second: float) -> str:
    return "" if not first or math.isnan(first + second) else growth(second / first - 1)


def _show(metric: str, value: float) -> str:
    return "-" if math.isnan(value) else metric_value(metric, value)
