"""Plotly figures that several parts of the page share. Numbers come in ready; this only lays them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tracekern.viewers.report.frame import Figure
from tracekern.viewers.words import duration, escape, unit_for

HEAT = [[0, "--heat-0"], [0.25, "--heat-1"], [0.5, "--heat-2"], [0.75, "--heat-3"], [1, "--heat-4"]]
ROW_PX = 26
MIN_ROW_PX = 13


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

    A pattern ("/", ".", "x", ...) tells parts apart where colours do not.
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
    row_px = max(MIN_ROW_PX, ROW_PX - max(0, len(rows) - 12))
    ticks = {"tickvals": list(range(len(rows))), "ticktext": [escape(row) for row in rows]}
    layout = {
        "barmode": "stack",
        "bargap": 0.28,
        "xaxis": {"title": {"text": axis}, **({"range": [0, 100], "ticksuffix": " %"} if is_share else {})},
        "yaxis": {**ticks, "autorange": "reversed", "showgrid": False, "tickfont": {"size": 12 if row_px > 18 else 9}},
        "showlegend": len(parts) > 1,
        "margin": {"t": 34 if len(parts) > 1 else 8, "b": 44},
    }
    return Figure(data, layout, row_px * len(rows) + 96, says)


def heatmap(
    names: Sequence[str],
    sum_ns: Sequence[Sequence[int]],
    hover: Sequence[Sequence[str]],
    marked: Sequence[tuple[int, int, int, int]],
    says: str,
) -> Figure:
    """Durations on a logarithmic colour scale; cells that are 0 stay empty.

    `marked`: frames from (row, column) to (row, column).
    """
    logs = [[math.log10(value) if value > 0 else None for value in row] for row in sum_ns]
    known = [value for row in logs for value in row if value is not None]
    low, high = (math.floor(min(known)), math.ceil(max(known))) if known else (0, 1)
    few = len(names) <= 12
    data: list[dict[str, Any]] = [
        {
            "type": "heatmap",
            "z": logs,
            "zmin": low,
            "zmax": max(high, low + 1),
            "colorscale": HEAT,
            "hovertext": hover,
            "hoverinfo": "text",
            "xgap": 2 if few else 0.5,
            "ygap": 2 if few else 0.5,
            "hoverongaps": False,
            "colorbar": {
                "tickvals": list(range(low, high + 1)),
                "ticktext": [duration(10.0**power) for power in range(low, high + 1)],
                "thickness": 12,
                "outlinewidth": 0,
                "len": 0.8,
            },
            **({"text": [[_cell(value) for value in row] for row in sum_ns], "texttemplate": "%{text}"} if few else {}),
        }
    ]
    step = 1 if len(names) <= 16 else 4 if len(names) <= 32 else 8
    ticks = {"tickvals": list(range(0, len(names), step)), "ticktext": list(names[::step]), "showgrid": False}
    layout = {
        "xaxis": {**ticks, "title": {"text": "is waited for (rank)"}, "side": "top", "constrain": "domain"},
        "yaxis": {
            **ticks,
            "title": {"text": "waits (rank)"},
            "autorange": "reversed",
            "scaleanchor": "x" if not few else False,
            "zeroline": False,
        },
        "shapes": [_frame(*place) for place in marked],
        "margin": {"t": 52},
        "narrow": {"font": {"size": 10}},
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
            "name": escape(name),
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
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": axis},
            "tickvals": powers,
            "ticktext": [duration(power) for power in powers],
        },
        "yaxis": {"title": {"text": "share that took at most this long"}, "ticksuffix": " %", "range": [0, 101]},
        "margin": {"t": 8 + 22 * ((len(curves) + 1) // 2), "b": 44},
    }
    return Figure(data, layout, 360, says)


def time_scale(values: Sequence[float]) -> tuple[str, float]:
    """The unit of an axis, and its ns."""
    return unit_for(max([1.0, *values]))


def _powers(values: Sequence[float]) -> list[float]:
    if not values:
        return [1.0]
    return [10.0**power for power in range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)]


def _pattern(shape: str) -> dict[str, Any]:
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "--panel", "fgopacity": 0.5, "size": 6} if shape else {}


def _cell(value: int) -> str:
    return duration(value) if value else ""


def _frame(top: int, left: int, bottom: int, right: int) -> dict[str, Any]:
    corners = {"x0": left - 0.48, "x1": right + 0.48, "y0": top - 0.48, "y1": bottom + 0.48}
    return {"type": "rect", **corners, "line": {"color": "--accent", "width": 2}}
