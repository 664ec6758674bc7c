"""Plotly figures that several parts of the page share. Numbers come in ready; this only lays them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tracekern.formatting import duration, escape, round_duration, unit_for
from tracekern.viewers.report.frame import Figure

HEAT = [[0, "--heat-0"], [0.25, "--heat-1"], [0.5, "--heat-2"], [0.75, "--heat-3"], [1, "--heat-4"]]
ROW_PX = 26
MIN_ROW_PX = 13
_LEGEND_LINE_PX, _WRAPPED_TITLE_PX = 17, 16
"""On a phone, where a legend has a line for each entry."""
_MAX_LABEL, _MAX_NARROW_LINE = 60, 26
"""Characters of a row's name beside its bar, and in each of its two lines on a phone; hover texts have all of it."""
_FEW_POWERS = 2.5
_MAX_LEGEND = 44
"""Characters of a name in a legend that has a line for each, as on a phone."""
_MAX_HALF_LINE = 30
"""Length of names such that two fit in a line of a legend on a page wider than a phone."""
MAX_FULL_ROWS = 24
_MAX_FULL_COLUMNS = 12
"""Rows and columns of a heatmap whose cells have room for numbers."""
_MAX_NARROW_CELLS = 5
"""Cells in a row of a heatmap on a phone; the numbers of more would be too small to read and are in the hover texts."""


def stacked_bars(
    rows: Sequence[str],
    parts: Sequence[tuple[str, str, str, Sequence[float]]],
    *,
    axis: str,
    says: str,
    is_share: bool = False,
    hover: Sequence[Sequence[str]] = (),
) -> Figure:
    """Horizontal bars, the first row on top. `parts`: (name, colour, pattern, value of each row); hover texts alike.

    A pattern ("/", ".", "x", ...) distinguishes parts where colours do not.
    """
    data: list[dict[str, Any]] = []
    for place, (name, color, pattern, values) in enumerate(parts):
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": list(range(len(rows))),
                "x": list(values),
                "hovertext": list(hover[place]) if hover else [],
                "hoverinfo": "text",
                "marker": {"color": color, "line": {"width": 0}, "pattern": _pattern(pattern)},
            }
        )
    legend_px = _LEGEND_LINE_PX * max(0, len(parts) - 2)
    row_px = max(MIN_ROW_PX, ROW_PX - max(0, len(rows) - 12))
    ticks = {"tickvals": list(range(len(rows))), "ticktext": [escape(shorten(row)) for row in rows]}
    narrow_labels = [_in_two_lines(row) for row in rows]
    two_line_px = 4 * len(rows) if any("<br>" in label for label in narrow_labels) else 0
    layout = {
        "barmode": "stack",
        "bargap": 0.28,
        "xaxis": {"title": {"text": axis}, **({"range": [0, 100], "ticksuffix": " %"} if is_share else {})},
        "yaxis": {
            **ticks,
            "autorange": "reversed",
            "showgrid": False,
            "zeroline": False,
            "tickfont": {"size": 12 if row_px > 18 else 9},
        },
        "showlegend": len(parts) > 1,
        "margin": {"t": 34 if len(parts) > 1 else 8, "b": 44, "r": 28},
        "narrow": {
            "xaxis": {"title": {"text": axis.replace(", ", ",<br>")}, "nticks": 4, "tickangle": 0},
            "yaxis": {"ticktext": narrow_labels, "tickfont": {"size": 10 if row_px > 18 else 9}},
            # The second line of the title makes no room for itself where the figure is low.
            "margin": {"t": 34 + legend_px if len(parts) > 1 else 8, "b": 44 + _WRAPPED_TITLE_PX},
            "taller": legend_px + _WRAPPED_TITLE_PX + two_line_px,
        },
    }
    return Figure(data, layout, row_px * len(rows) + 96, says)


def grouped_bars(
    rows: Sequence[str],
    bars: Sequence[tuple[str, str, str, Sequence[float], Sequence[str]]],
    *,
    axis: str,
    says: str,
) -> Figure:
    """Horizontal bars beside each other, the first row on top. `bars`: (name, colour, pattern, values, their texts)."""
    parts = [bar[:4] for bar in bars]
    hover = [
        [f"{escape(row)}<br>{escape(name)}: {text}" for row, text in zip(rows, texts, strict=True)]
        for name, *_, texts in bars
    ]
    figure = stacked_bars(rows, parts, axis=axis, says=says, hover=hover)
    layout = {**figure.layout, "barmode": "group", "bargap": 0.35, "bargroupgap": 0.05}
    return Figure(figure.data, layout, figure.height + 10 * len(rows), says)


def heatmap(
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    hover: Sequence[Sequence[str]],
    marked: Sequence[tuple[int, int, int, int]],
    says: str,
    *,
    columns: Sequence[str] | None = None,
    axes: tuple[str, str] = ("waits (rank)", "is waited for (rank)"),
    say: Callable[[float], str] | None = None,
) -> Figure:
    """A matrix whose rows have these names; cells that are 0 stay empty. `columns`: by default the same, a square.

    Durations (ns) on a logarithmic colour scale; with `say`, which writes a number, others on a linear one. `marked`:
    frames from (row, column) to (row, column).
    """
    shade = (lambda value: value) if say else math.log10
    shades = [[shade(value) if value > 0 else None for value in row] for row in values]
    known = [value for row in shades for value in row if value is not None]
    is_square = columns is None
    columns = names if columns is None else columns
    few = len(names) <= MAX_FULL_ROWS and len(columns) <= _MAX_FULL_COLUMNS
    data: list[dict[str, Any]] = [
        {
            "type": "heatmap",
            "z": shades,
            "colorscale": HEAT,
            "hovertext": hover,
            "hoverinfo": "text",
            "xgap": 2 if few else 0.5,
            "ygap": 2 if few else 0.5,
            "hoverongaps": False,
            "colorbar": {"thickness": 12, "outlinewidth": 0, "len": 0.8},
        }
    ]
    if say:
        data[0] |= {"zmin": 0, "zmax": max([*known, 1e-9])}
    else:
        low, high = (math.floor(min(known)), math.ceil(max(known))) if known else (0, 1)
        powers = list(range(low, max(high, low + 1) + 1))
        data[0] |= {"zmin": powers[0], "zmax": powers[-1]}
        data[0]["colorbar"] |= {"tickvals": powers, "ticktext": [round_duration(10.0**power) for power in powers]}
    if few:
        cells = [[(say or duration)(value) if value else "" for value in row] for row in values]
        data[0] |= {"text": cells, "texttemplate": "%{text}"}
    layout = {
        "xaxis": {**_ticks(columns), "title": {"text": axes[1]}, "side": "top", "constrain": "domain"},
        "yaxis": {
            **_ticks(names),
            "title": {"text": axes[0]},
            "autorange": "reversed",
            "scaleanchor": "x" if is_square and not few else False,
        },
        "shapes": [_frame(*place) for place in marked],
        "margin": {"t": 52},
        "narrow": {"font": {"size": 10}, "bare": len(columns) > _MAX_NARROW_CELLS, "square": is_square and not few},
    }
    return Figure(data, layout, max(260, min(720, 44 * len(names) + 90)), says)


def steps(curves: Sequence[tuple[str, Sequence[float], Sequence[float]]], axis: str, says: str) -> Figure:
    """Cumulative shares over a logarithmic axis of durations (ns)."""
    dashes = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
    colors = ("--wait", "--work", "--signal", "--sync", "--passed", "--launch")
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": escape(shorten(name, _MAX_LEGEND)),
            "x": list(x),
            "y": list(y),
            "line": {
                "color": colors[place % len(colors)],
                "dash": dashes[place % len(dashes)],
                "width": 2,
                "shape": "hv",
            },
            "hovertext": [
                f"{escape(name)}<br>{share:.0f} % take at most {duration(ns)}" for ns, share in zip(x, y, strict=True)
            ],
            "hoverinfo": "text",
        }
        for place, (name, x, y) in enumerate(curves)
    ]
    powers = _powers([value for _, x, _ in curves for value in x if value > 0])
    legend_px = _LEGEND_LINE_PX * len(curves) + 10
    can_share_lines = all(len(name) <= _MAX_HALF_LINE for name, *_ in curves)
    wide_px = _LEGEND_LINE_PX * ((len(curves) + 1) // 2) + 10 if can_share_lines else legend_px
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": axis},
            "tickvals": powers,
            "ticktext": [round_duration(power) for power in powers],
        },
        "yaxis": {"title": {"text": "share that took at most this long"}, "ticksuffix": " %", "range": [0, 101]},
        "showlegend": True,
        "margin": {"t": 8 + wide_px, "b": 44},
        "narrow": {"margin": {"t": 8 + legend_px, "b": 44}, "taller": legend_px * 3 // 2 - wide_px},
    }
    return Figure(data, layout, 300 + wide_px, says)


def time_scale(values: Sequence[float]) -> tuple[str, float]:
    """The unit of an axis, and its ns."""
    return unit_for(max([1.0, *values]))


def shorten(name: str, limit: int = _MAX_LABEL) -> str:
    """A name that fits beside a bar: the middle of a longer one is left out: its ends say more."""
    if len(name) <= limit:
        return name
    return f"{name[: limit // 2]}…{name[1 - limit // 2 :]}"


def _in_two_lines(name: str) -> str:
    """The same for a phone, as Plotly's HTML."""
    if len(name) <= _MAX_NARROW_LINE:
        return escape(name)
    if len(name) > 2 * _MAX_NARROW_LINE:
        name = f"{name[:_MAX_NARROW_LINE]}…{name[1 - _MAX_NARROW_LINE :]}"
    ends = [place for place in range(len(name) - _MAX_NARROW_LINE, _MAX_NARROW_LINE + 1) if name[place - 1] in " ._…"]
    middle = len(name) // 2
    place = min(ends, key=lambda end: abs(end - middle), default=middle)
    return f"{escape(name[:place].rstrip())}<br>{escape(name[place:])}"


def _powers(values: Sequence[float]) -> list[float]:
    """Ticks of a logarithmic axis: powers of ten; where those would be one or two, twos and fives as well."""
    if not values:
        return [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    steps = (1.0, 2.0, 5.0) if math.log10(max(values) / min(values)) < _FEW_POWERS else (1.0,)
    return [step * 10.0**power for power in range(low, high + 1) for step in steps]


def _ticks(names: Sequence[str]) -> dict[str, Any]:
    """A row or column each; of many only some are named."""
    step = 1 if len(names) <= 16 else 4 if len(names) <= 32 else 8
    places = list(range(0, len(names), step))
    return {"tickvals": places, "ticktext": list(names[::step]), "showgrid": False, "zeroline": False}


def _pattern(shape: str) -> dict[str, Any]:
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "--panel", "fgopacity": 0.5, "size": 6} if shape else {}


def _frame(top: int, left: int, bottom: int, right: int) -> dict[str, Any]:
    corners = {"x0": left - 0.48, "x1": right + 0.48, "y0": top - 0.48, "y1": bottom + 0.48}
    return {"type": "rect", **corners, "line": {"color": "--accent", "width": 2}}
