"""The history of a gate as one page that works offline: every metric over the checks, those that crept first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracekern import __version__
from tracekern.formatting import count, escape, growth, is_share, metric_value, unit_for
from tracekern.viewers.report.frame import Answer, Figure, Part, render, table

Points = Sequence[tuple[str, float, float, float]]
"""(label of the check, lowest, median, highest of its runs) in order. A label is "NUMBER: when"; not every check has
every metric."""

_MAX_NAMED = 2
_MAX_TICKS = 12
_LEAST_RANGE = 6
"""Percent: what no check would call a change looks flat."""


def trend_page(device: str, series: Mapping[str, Points], drifts: Mapping[str, float] | None) -> str:
    """The HTML. series: metric -> points; drifts: the metrics that crept, with their growth since the first check, None
    where no two checks can be compared.

    Raises BadInput where plotly is missing.
    """
    growths = drifts or {}
    crept = sorted((name for name in growths if name in series), key=lambda name: -growths[name])
    steady = sorted(name for name in series if name not in growths)
    checks = sorted({label for points in series.values() for label, *_ in points}, key=_number)
    aside = (
        "The line is the median of each check's launches, in percent of the first check's (as it is where that is 0). "
        "The band reaches from the lowest launch to the highest. A metric has crept if the newest check and the first "
        "one with enough launches differ by more than noise and floor."
    )
    parts = [
        Part(
            "crept",
            "Drift",
            "What crept since the first check?",
            Answer(
                _answer(drifts, len(checks)),
                [block for name in crept for block in _metric(name, series[name], len(checks), "--wait")],
                aside,
            ),
        )
    ]
    if steady:
        others = [block for name in steady for block in _metric(name, series[name], len(checks), "--work")]
        answer = f"{count(len(steady), 'metric')} that did not creep, or not for certain."
        parts.append(Part("others", "The rest", "How did the others move?", Answer(answer, others)))
    rows = [[escape(number), escape(when)] for number, _, when in (label.partition(": ") for label in checks)]
    about = "Checks of this device, its hosts and this shape."
    listed = Answer(about, [table(["check", "date, commit"], rows)])
    parts.append(Part("checks", "Checks", "Which checks are these?", listed))
    lead = f"<p>{count(len(checks), 'check')} · {count(len(series), 'metric')}</p>"
    return render(device, lead, parts, f"tracekern {__version__}")


def _answer(drifts: Mapping[str, float] | None, checks: int) -> str:
    if checks < 2:
        return "There is one check: nothing to compare it with."
    if drifts is None:
        return "Too few launches in the newest check, or in all before it: nothing can be compared."
    if not drifts:
        return "Nothing crept since the first check."
    named = [f"<b>{escape(name)}</b> {growth(change)}" for name, change in list(drifts.items())[:_MAX_NAMED]]
    more = f" and {len(drifts) - _MAX_NAMED} more" if len(drifts) > _MAX_NAMED else ""
    return f"These crept since the first check: {', '.join(named)}{more}."


def _number(label: str) -> int:
    return int(label.partition(":")[0])


@dataclass(frozen=True)
class _Scale:
    """How the values of a metric are drawn: (value - zero) / size, in `unit`."""

    zero: float
    size: float
    unit: str
    least_range: tuple[float, float]

    def draw(self, value: float) -> float:
        return (value - self.zero) / self.size


def _scale(name: str, points: Points) -> _Scale:
    """Percent of the first check's median; of a median of zero there is no percent: the metric's own unit."""
    if first := points[0][2]:
        return _Scale(first, first / 100, "%", (-_LEAST_RANGE, _LEAST_RANGE))
    if is_share(name):
        return _Scale(0.0, 0.01, "%", (0, _LEAST_RANGE))
    unit, size = unit_for(max(most for *_, most in points))
    return _Scale(0.0, size, unit, (0, 1))


def _metric(name: str, points: Points, num_checks: int, color: str) -> list[str | Figure]:
    first, last = points[0][2], points[-1][2]
    moved = " → ".join(metric_value(name, value) for value in (first, last)[: len(points)])
    own_unit = "" if first else "; drawn as it is, not in percent of the first check, which is zero"
    return [f"<h3>{escape(name)}</h3><p class='aside'>{moved}{own_unit}</p>", _figure(name, points, num_checks, color)]


def _figure(name: str, points: Points, num_checks: int, color: str) -> Figure:
    """Band and line, of all checks on the same axis."""
    scale = _scale(name, points)
    numbers = [_number(label) for label, *_ in points]
    low, middle, high = ([scale.draw(values[i]) for _, *values in points] for i in range(3))
    look: dict[str, Any] = {"type": "scatter", "showlegend": False, "x": numbers, "hoverinfo": "skip", "mode": "lines"}
    edge = {"width": 0, "color": "--host"}
    line = {
        **look,
        "mode": "lines+markers",
        "y": middle,
        "line": {"color": color, "width": 2},
        "marker": {"size": 6},
        "hoverinfo": "text",
        "hovertext": [_hover(name, point, points[0][2]) for point in points],
    }
    band = {**look, "y": high, "line": edge, "fill": "tonexty", "opacity": 0.5}
    ticks = list(range(1, num_checks + 1, math.ceil(num_checks / _MAX_TICKS)))
    least, most = scale.least_range
    layout = {
        "xaxis": {"title": {"text": "check"}, "tickvals": ticks, "range": [0.8, num_checks + 0.2]},
        "yaxis": {
            "ticksuffix": f" {scale.unit}",
            "nticks": 5,
            "range": [min(least, 1.1 * min(low)), max(most, 1.1 * max(high))],
        },
        "margin": {"b": 40},
    }
    return Figure([{**look, "y": low, "line": edge}, band, line], layout, 190, f"{name} over the checks")


def _hover(name: str, point: tuple[str, float, float, float], first: float) -> str:
    label, least, median, most = point
    change = f"<br>{100 * (median / first - 1):+.1f} % of the first check" if first else ""
    values = f"median {metric_value(name, median)}, {metric_value(name, least)} to {metric_value(name, most)}"
    return f"{escape(label)}{change}<br>{values}"
