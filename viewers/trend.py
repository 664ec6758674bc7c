"""The history of a gate as one page that works offline: every metric over the checks, those that crept first."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

Points = Sequence[tuple[str, float, float, float]]
"""(label of the check, lowest, median, highest of its runs) in order."""

_ROW_PIXELS = 180
_MAX_NAMED = 2
_LINE, _BAND, _CREPT = "#0072b2", "rgba(0,114,178,0.18)", "#d55e00"  # told apart by colour-blind readers


def trend_page(device: str, series: Mapping[str, Points], drifts: Mapping[str, float]) -> str:
    """The HTML. series: metric -> points; drifts: the metrics that crept, with their growth since the first check.

    Raises BadInput where plotly is missing.
    """
    from tracekern.errors import BadInput

    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise BadInput("the trend page needs plotly, which is not installed; pip install 'tracekern[read]'") from None

    names = sorted(series, key=lambda name: (-drifts.get(name, float("-inf")), name))
    rows = max(1, len(names))
    figure = make_subplots(rows, 1, subplot_titles=names, vertical_spacing=0.35 / rows)
    for row, name in enumerate(names, 1):
        for trace in _traces(series[name], _CREPT if name in drifts else _LINE):
            figure.add_trace(trace, row, 1)
    checks = max(map(len, series.values()), default=0)
    figure.update_layout(
        title={"text": _title(device, checks, drifts), "x": 0.01},
        height=_ROW_PIXELS * rows + 180,
        showlegend=False,
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 150, "b": 30},
    )
    figure.update_xaxes(showticklabels=False)
    figure.update_yaxes(ticksuffix=" %", zeroline=True)
    figure.update_annotations(font_size=12)
    return str(figure.to_html(include_plotlyjs=True, full_html=True, config={"displaylogo": False}))


def _traces(points: Points, color: str) -> list[Any]:
    """The band of the runs and the line of their medians, in percent of the first check's median."""
    import plotly.graph_objects as go

    first = points[0][2] or 1.0
    labels = [label for label, *_ in points]
    low, middle, high = ([100 * (point[i] / first - 1) for point in points] for i in (1, 2, 3))
    band = go.Scatter(
        x=labels + labels[::-1], y=high + low[::-1], fill="toself", fillcolor=_BAND, line_width=0, hoverinfo="skip"
    )
    line = go.Scatter(
        x=labels,
        y=middle,
        mode="lines+markers",
        line_color=color,
        customdata=[point[2] for point in points],
        hovertemplate="%{x}<br>%{y:+.1f} of the first check<br>median %{customdata:.4~g}<extra></extra>",
    )
    return [band, line]


def _title(device: str, checks: int, drifts: Mapping[str, float]) -> str:
    crept = ", ".join(f"{name} {100 * growth:+.1f} %" for name, growth in list(drifts.items())[:_MAX_NAMED])
    crept += f" and {len(drifts) - _MAX_NAMED} more" if len(drifts) > _MAX_NAMED else ""
    said = f"crept since the first check: {crept}" if drifts else "nothing crept since the first check"
    about = f"{checks} checks, percent of the first; line: median, band: all launches"
    return f"{html.escape(device)}<br><sup>{about}<br>{html.escape(said)}</sup>"
