"""What bounds the time? The critical path by part, and which rank it runs through when."""

from __future__ import annotations

from typing import Any

from tracekern.analysis.findings import Findings
from tracekern.analysis.graph.launch_graph import EdgeKind
from tracekern.analysis.why.critical_path import IterationPath, PathKind, PathPart
from tracekern.formatting import count, duration, escape, percent, sentence
from tracekern.viewers.report.causes import HOST_OR_KERNEL, describe_phase
from tracekern.viewers.report.charts import stacked_bars, time_scale
from tracekern.viewers.report.frame import Answer, Figure
from tracekern.viewers.report.question import Question

_MAX_PARTS = 10
_MAX_STRETCHES = 4000
_LOOKS = {
    PathKind.PHASE: ("in a kernel", "--work", ""),
    PathKind.LINK: ("on a link", "--link", "."),
    PathKind.HOST: ("before a kernel was launched", "--host", "/"),
    PathKind.GAP: ("before a kernel", "--gap", "-"),
}


def draw(findings: Findings) -> Answer:
    whole = findings.critical_path.whole
    if whole is None or not whole.parts:
        note = findings.critical_path.note or "there is no path"
        return Answer(escape(sentence(note)))
    first = whole.parts[0]
    answer = (
        f"<b>{percent(first.time_ns, whole.makespan_ns)}</b> of the {duration(whole.makespan_ns)} on the critical path "
        f"is {escape(describe_part(first))}."
    )
    body: list[str | Figure] = [_part_bars(whole)]
    if len(findings.timeline.ranks) > 1:
        body += ["<h3>Where the path runs</h3>", _route(findings, whole)]
    aside = (
        "The critical path is the longest path through the graph of the run. It leads back from the end of the last "
        "kernel: at each moment to what came last of all that had to happen before, be it work of the same warp, a "
        "message, another warp at a barrier, or the kernel before. Its parts add up to the duration of the capture. "
        "Shortening anything that is not on it does not make the run end earlier."
    )
    return Answer(answer, body, aside)


QUESTION = Question("path", "Path", "What bounds the time?", draw, order=50)


def describe_part(part: PathPart) -> str:
    """ "combine_recv.reduce_token of rank 3", "the link 0 → 3", "rank 0's gaps before kernels (its host)"."""
    if part.kind in (PathKind.HOST, PathKind.GAP):
        what = "its host" if part.kind == PathKind.HOST else HOST_OR_KERNEL
        return f"rank {part.rank}'s gaps before kernels ({what})"
    if part.kind == PathKind.LINK:
        is_within = part.rank == part.peer
        return f"messages within rank {part.rank}" if is_within else f"the link {part.rank} → {part.peer}"
    return f"{describe_phase(part.phase)} of rank {part.rank}"


def _part_bars(path: IterationPath) -> Figure:
    shown = path.parts[:_MAX_PARTS]
    rest = path.parts[_MAX_PARTS:]
    bars = [(describe_part(part), [part]) for part in shown]
    if rest:
        bars.append((count(len(rest), "smaller part"), list(rest)))
    rows = [name for name, _ in bars]
    unit, size = time_scale([sum(part.time_ns for part in parts) for _, parts in bars])
    parts, hover = [], []
    for kind, (name, color, pattern) in _LOOKS.items():
        own = [sum(part.time_ns for part in parts if part.kind == kind) for _, parts in bars]
        if not any(own):
            continue
        parts.append((name, color, pattern, [ns / size for ns in own]))
        hover.append(
            [
                f"{escape(row)}<br>{duration(ns)}, {percent(ns, path.makespan_ns)} of the path"
                for row, ns in zip(rows, own, strict=True)
            ]
        )
    return stacked_bars(
        rows, parts, axis=f"{unit} of the critical path", says="Parts of the critical path", hover=hover
    )


def _route(findings: Findings, path: IterationPath) -> Figure:
    """A line at the height of the rank that the path runs through; where there are many, neighbours as one."""
    stretches = path.stretches.at_most(_MAX_STRETCHES)
    unit, size = time_scale([path.makespan_ns])
    ranks = [rank.rank for rank in findings.timeline.ranks]
    row = {rank: place for place, rank in enumerate(ranks)}
    data: list[dict[str, Any]] = []
    for name, color, dash, on_host in (("in a kernel", "--work", "solid", False), ("host", "--host", "solid", True)):
        own = [
            idx
            for idx in range(len(stretches))
            if (int(stretches.kind[idx]) == EdgeKind.GAP) == on_host and int(stretches.rank[idx]) in row
        ]
        x: list[float | None] = []
        y: list[int | None] = []
        text: list[str] = []
        for idx in own:
            begin, end, rank = int(stretches.start[idx]), int(stretches.end[idx]), int(stretches.rank[idx])
            x += [(begin - path.start_ns) / size, (end - path.start_ns) / size, None]
            y += [row[rank], row[rank], None]
            length = f": {duration(end - begin)}" if stretches is path.stretches else ""
            text += [f"rank {rank}, {name}{length}"] * 2 + [""]
        # Simplified, lines of less than a pixel vanish, and with many of them the whole path.
        line = {"color": color, "width": 9 if on_host else 15, "dash": dash, "simplify": False}
        look = {"type": "scatter", "mode": "lines", "name": name, "line": line, "hoverinfo": "text"}
        data.append({**look, "x": x, "y": y, "hovertext": text})
    step = 1 if len(ranks) <= 24 else 4
    layout = {
        "xaxis": {
            "title": {"text": f"{unit} from the first event"},
            "zeroline": False,
            "range": [0, path.makespan_ns / size],
        },
        "yaxis": {
            "tickvals": list(range(0, len(ranks), step)),
            "ticktext": [f"rank {rank}" for rank in ranks[::step]],
            "range": [len(ranks) - 0.5, -0.5],
            "zeroline": False,
        },
        "margin": {"t": 34, "b": 44},
    }
    return Figure(data, layout, max(180, min(560, 30 * len(ranks) + 90)), "Ranks that the critical path runs through")
