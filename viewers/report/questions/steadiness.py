"""Is every iteration like the others? Their durations, how the waits are distributed, and three iterations drawn."""

from __future__ import annotations

from collections.abc import Sequence

from tracekern.analysis.findings import Findings
from tracekern.analysis.questions.gantt import ChosenSpans, choose_spans
from tracekern.analysis.waits.distribution import Distribution
from tracekern.formatting import count, duration, escape, sentence
from tracekern.timeline.model import EventType, Timeline, Track, TrackKind, unpack_field
from tracekern.viewers.report.charts import shorten, steps, time_scale
from tracekern.viewers.report.frame import Answer, Figure, Gantt
from tracekern.viewers.report.headlines import steadiness
from tracekern.viewers.report.question import Question

_MAX_CURVES = 6


def draw(findings: Findings) -> Answer:
    distributions = findings.distributions([entry.phase for entry in findings.phases[:_MAX_CURVES] if entry.phase])
    gantts = _choose(findings)
    body: list[str | Figure | list[Gantt]] = []
    if len(findings.iterations) > 1:
        body.append(_durations(findings))
    if distributions:
        body += ["<h3>How long single waits take</h3>", _ecdf(distributions)]
    if gantts:
        body += ["<h3>Inside an iteration</h3>", _gantts(findings, gantts)]
    left_out = sum(gantt.num_spans_left_out for gantt in gantts)
    aside = "Rows are the warps of each rank, on a narrow page as block·warp. " if gantts else ""
    if left_out:
        aside += (
            f"Those that waited longest are drawn; {count(left_out, 'more span')} of these iterations are left out. "
            "Perfetto shows them all."
        )
    answer = steadiness(findings)
    return Answer(escape(sentence(answer)), body, aside)


QUESTION = Question("steadiness", "Steadiness", "Is every iteration like the others?", draw, order=60)


def _durations(findings: Findings) -> Figure:
    iterations = findings.iterations
    unit, size = time_scale(iterations.duration_ns.tolist())
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(iterations) <= 200 else "lines",
            "x": iterations.number.tolist(),
            "y": (iterations.duration_ns / size).tolist(),
            "line": {"color": "--work", "width": 1.5},
            "marker": {"size": 6},
            "hovertext": [
                f"iteration {number}: {duration(ns)}"
                for number, ns in zip(iterations.number.tolist(), iterations.duration_ns.tolist(), strict=True)
            ],
            "hoverinfo": "text",
        }
    ]
    few = {"dtick": 1} if len(iterations) <= 24 else {}
    layout = {
        "xaxis": {"title": {"text": "iteration"}, "tickformat": "d", "showgrid": False, **few},
        "yaxis": {"title": {"text": f"duration ({unit})"}, "rangemode": "tozero"},
        "showlegend": False,
        "margin": {"b": 44},
    }
    return Figure(data, layout, 240, "Duration of each iteration")


def _ecdf(distributions: Sequence[Distribution]) -> Figure:
    curves = [
        (
            str(entry.phase),
            [max(1, ns) for ns in entry.wait_ns[[0, *range(len(entry.wait_ns))]].tolist()],
            [0.0, *(100 * entry.share).tolist()],
        )
        for entry in distributions
    ]
    return steps(curves, "duration of a wait", "Empirical distribution of the waits, by phase")


def _choose(findings: Findings) -> list[ChosenSpans]:
    """Spans of the longest, the median and the shortest iteration; fewer where these are the same."""
    iterations = findings.iterations
    rows = dict.fromkeys(reversed(iterations.best_median_worst())) if len(iterations) else {}
    return [choose_spans(findings.timeline_of_iteration(iterations.number[row]), iterations, row) for row in rows]


def _gantts(findings: Findings, choices: Sequence[ChosenSpans]) -> list[Gantt]:
    names = {1: ("only",), 2: ("worst", "best"), 3: ("worst", "median", "best")}[len(choices)]
    return [_gantt(findings, choice, name) for choice, name in zip(choices, names, strict=True)]


def _gantt(findings: Findings, choice: ChosenSpans, name: str) -> Gantt:
    timeline, iterations, spans = findings.timeline, findings.iterations, choice.spans
    row_of = {track: row for row, track in enumerate(choice.tracks)}
    events = sorted(set(spans.event.tolist()))
    kind_of = {event: kind for kind, event in enumerate(events)}
    length = int(iterations.duration_ns[choice.iteration])
    columns = {
        "row": [row_of[track] for track in spans.track.tolist()],
        "kind": [kind_of[event] for event in spans.event.tolist()],
        "start": (spans.start - iterations.start[choice.iteration]).tolist(),
        "duration": (spans.end - spans.start).tolist(),
        "detail": _details(timeline, choice),
    }
    tracks = [timeline.tracks[idx] for idx in choice.tracks]
    own = {rank: [track for track in tracks if track.rank == rank] for rank in {track.rank for track in tracks}}
    row_px = 18 if len(tracks) <= 60 else 11
    return Gantt(
        name=f"{name} iteration: {int(iterations.number[choice.iteration])}, {duration(length)}",
        rows=[_row_name(track, own[track.rank]) for track in tracks],
        short_rows=[_short_row_name(track, own[track.rank]) for track in tracks],
        ranks=[track.rank for track in tracks],
        kinds=[(escape(timeline.events[event].name), timeline.events[event].event_class.value) for event in events],
        columns=columns,
        height=row_px * len(tracks) + 96,
    )


def _details(timeline: Timeline, choice: ChosenSpans) -> list[str]:
    """The begin fields of each span, as text."""
    spans = choice.spans
    details = [""] * len(spans)
    for event in sorted(set(spans.event.tolist())):
        about: EventType = timeline.events[event]
        chosen = (spans.event == event).nonzero()[0].tolist()
        values = [
            (entry.name, unpack_field(about.begin_fields, entry.name, spans.begin_payload[chosen]).tolist())
            for entry in about.begin_fields
        ]
        for place, index in enumerate(chosen):
            details[index] = ", ".join(f"{name} {column[place]}" for name, column in values)
    return details


def _row_name(track: Track, of_rank: list[Track]) -> str:
    """`of_rank`: the rows of its rank. With its stream, where the rank has several."""
    if track.kind == TrackKind.LAUNCH:
        return f"rank {track.rank} {track.name if _has_streams(of_rank) else 'kernels'}"
    stream = f" stream {track.stream}" if _has_streams(of_rank) else ""
    return shorten(f"{track.name}{stream} {track.role}".strip())


def _short_row_name(track: Track, of_rank: list[Track]) -> str:
    stream = f" s{track.stream}" if _has_streams(of_rank) else ""
    return f"rank {track.rank}{stream}" if track.kind == TrackKind.LAUNCH else f"{track.block}·{track.warp}{stream}"


def _has_streams(tracks: list[Track]) -> bool:
    """A lane of a stream counts: of kernels that ran at the same time."""
    return sum(track.kind == TrackKind.LAUNCH for track in tracks) > 1
