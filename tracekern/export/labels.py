"""The words of a picture: what a stranger reads on a trace about its run, its ranks, its clocks and its losses."""

from __future__ import annotations

import math

import numpy as np

from tracekern import __version__
from tracekern.export.drawing import Drawing, first_waits
from tracekern.formatting import count, duration
from tracekern.timeline.model import OPEN_END, Int64, Problem, Rank, Timeline, Track, TrackKind, count_problems

_CLOCKS = {"reference": "clock reference", "unaligned": "UNALIGNED"}
"""Texts for clocks that have no bound."""

_STATES = ("salvaged", "running", "counted_only", "cycle_rate_unknown")
"""Kinds of problems that say how it was: 2 salvaged. Others are counted: 2 lost records."""

UNALIGNED = "UNALIGNED: every rank on its own clock, times of different ranks cannot be compared"


def title(timeline: Timeline) -> str:
    """One line; starts with UNALIGNED when the ranks' clocks were not related."""
    text = timeline.title or "trace"
    if not timeline.aligned and "UNALIGNED" not in text.upper():
        text = f"UNALIGNED {text}"
    return f"tracekern: {text}"


def banner(timeline: Timeline, spans_left_out: int = 0, flows_left_out: int = 0, part: str = "") -> str:
    """What must be known before a duration is believed, on one line. part: what alone is drawn, in words."""
    parts = [*notes(timeline), *([] if timeline.aligned else [UNALIGNED]), problem_summary(timeline.problems)]
    if part:
        parts.append(f"drawn: {part}; all: tracekern open --all")
    if spans_left_out:
        parts.append(f"{count(spans_left_out, 'span')} of other warps left out: one row per block and role")
    if flows_left_out:
        parts.append(f"{count(flows_left_out, 'arrow')} of shorter waits left out")
    return " · ".join(part for part in parts if part) or "about this trace"


def notes(timeline: Timeline) -> list[str]:
    return sorted({str(rank.metadata["note"]) for rank in timeline.ranks if rank.metadata.get("note")})


def problem_summary(problems: tuple[Problem, ...]) -> str:
    """ "1 lost record, 614 unmatched waits"."""
    return ", ".join(_count_kind(kind, number) for kind, number in sorted(count_problems(problems).items()))


def _count_kind(kind: str, number: int) -> str:
    text = kind.replace("_", " ")
    if kind in _STATES:
        return f"{number:,} {text}"
    if kind.startswith("launch_"):
        return count(number, "launch") + text.removeprefix("launch")
    return count(number, text.removesuffix("s"))


def about(timeline: Timeline) -> dict[str, str]:
    """Everything a reader may ask about the trace, as text, in the order it is shown."""
    facts = {"title": title(timeline), "aligned": "yes" if timeline.aligned else UNALIGNED}
    for key in ("run_id", "command", "created", "note", "settings"):
        values = sorted({str(rank.metadata[key]) for rank in timeline.ranks if rank.metadata.get(key)})
        if values:
            facts[key] = values[0] if len(values) == 1 or key == "created" else "; ".join(values)
    facts["origin_ns"] = str(timeline.origin_ns)
    for rank in timeline.ranks:
        facts[f"rank_{rank.rank}"] = _describe_rank(rank)
    if timeline.problems:
        facts["problems"] = problem_summary(timeline.problems)
    facts["written_by"] = f"tracekern {__version__}"
    return facts


def describe_first_waits(drawing: Drawing, time_shift: int) -> dict[str, str]:
    """The waits that `tracekern open` leads to, by the names under which it looks for them (viewers/perfetto_ui.py)."""
    first = first_waits(drawing)
    described = {}
    if first.longest >= 0:
        described["longest_wait"] = _describe_wait(drawing, first.longest, time_shift, first.when)
    if first.outlier >= 0:
        described["outlier_wait"] = _describe_wait(drawing, first.outlier, time_shift, first.outlier_when)
    return described


def _describe_wait(drawing: Drawing, span_idx: int, time_shift: int, when: str) -> str:
    """Where the wait is and what released it."""
    spans, releaser = drawing.timeline.spans, int(drawing.releaser[span_idx])
    start, length = int(spans.start[span_idx]), int(drawing.draw_end[span_idx] - spans.start[span_idx])
    end = ", never ended" if spans.end[span_idx] == OPEN_END else ""
    by = f"; released by {describe_span(drawing.timeline, releaser)}" if releaser >= 0 else ""
    place = describe_span(drawing.timeline, span_idx)
    lasts = f"{duration(length)} {when}".strip()
    return f"ts {start + time_shift} dur {length} ({place}, {lasts}{end}{by})"


def marks_of_longest_wait(drawing: Drawing) -> dict[int, str]:
    """The tracks of the longest wait and of the signal that released it, each with what to put before its name.

    `tracekern open` pins rows by these words (viewers/perfetto_ui.py); SQL leaves them out (viewers/sql/tk_wait.sql).
    """
    wait = first_waits(drawing).longest
    releaser = int(drawing.releaser[wait]) if wait >= 0 else -1
    marks: dict[int, str] = {}
    for span_idx, words in ((releaser, "released it"), (wait, "longest wait")):
        if span_idx >= 0:
            track = int(drawing.timeline.spans.track[span_idx])
            marks[track] = f"{words}: {_rank_of(drawing.timeline, track)} · "
    return marks


def describe_spans(drawing: Drawing) -> str:
    """ "250000": the spans and marks that are drawn, for `tracekern open`."""
    return str(len(drawing.timeline.spans) + len(drawing.timeline.marks))


def describe_flows(drawing: Drawing) -> str:
    """ "5000 of 36556": the arrows that are drawn, of those that could be; `tracekern open` reads the first number."""
    return f"{drawing.flow_drawn.sum()} of {drawing.flow_drawable.sum()}"


def describe_span(timeline: Timeline, span_idx: int) -> str:
    """ "rank 1 block 015 warp 03 send: signal_token", for a span of a kernel."""
    track_idx = int(timeline.spans.track[span_idx])
    event = timeline.events[timeline.spans.event[span_idx]].name
    return f"{_rank_of(timeline, track_idx)} {flat_label(timeline.tracks[track_idx], 1)}: {event}"


def _rank_of(timeline: Timeline, track_idx: int) -> str:
    number = timeline.tracks[track_idx].rank
    return next((_rank_name(rank) for rank in timeline.ranks if rank.rank == number), f"rank {number}")


def describe_releasers(drawing: Drawing) -> tuple[list[str], Int64]:
    """Texts that say which signal releases waits, and [num_spans] the index of each wait's, -1 for other spans."""
    if drawing.released_by is not None:
        return drawing.released_by
    spans = drawing.timeline.spans
    which = np.full(len(spans), -1, np.int64)
    waits = np.flatnonzero(drawing.releaser >= 0)
    signals = drawing.releaser[waits]
    kind = spans.track[signals].astype(np.int64) * len(drawing.timeline.events) + spans.event[signals]
    _, first, which[waits] = np.unique(kind, return_index=True, return_inverse=True)
    return [describe_span(drawing.timeline, span_idx) for span_idx in signals[first].tolist()], which


def rank_label(rank: Rank, num_nodes: int) -> str:
    """Short: Perfetto cuts the middle out of a longer name. about() has the rest."""
    parts = [_rank_name(rank)]
    if num_nodes > 1:
        parts.append(f"@{rank.node}")
    if rank.state != "closed":
        parts.append(rank.state.upper())
    if rank.clock is not None:
        parts.append(_CLOCKS.get(rank.clock.method, f"±{duration(rank.clock.hard_ns)}"))
    return " ".join(parts)


def _rank_name(rank: Rank) -> str:
    return rank.label or f"rank {rank.rank}"


def block_label(track: Track, num_streams: int) -> str:
    stream = f" stream {track.stream}" if num_streams > 1 else ""
    return f"block {track.block:03}{stream}"


def warp_label(track: Track) -> str:
    group = f"group {track.group} sub {track.sub_warp} " if track.group >= 0 else ""
    return f"warp {track.warp:02} {group}{track.role}".rstrip()


def flat_label(track: Track, num_streams: int) -> str:
    """The whole name of a track on one row, for formats without nested rows."""
    if track.kind != TrackKind.DEVICE:
        return track.name
    return f"{block_label(track, num_streams)} {warp_label(track)}"


def _describe_rank(rank: Rank) -> str:
    name = f"{rank.label}: " if rank.label else ""
    text = f"{name}{rank.device} on {rank.node}, backend {rank.backend}, {rank.state}"
    clock = rank.clock
    if clock is None:
        return f"{text}, clock not fitted"
    if clock.method in _CLOCKS:
        how = _CLOCKS[clock.method]
    else:
        bounds = f"±{duration(clock.hard_ns)} proven, ±{duration(clock.sigma_ns)} repeatable"
        how = f"clock by {clock.method}, {bounds}"
    host = "" if math.isnan(clock.host_hard_ns) else f", host lanes ±{duration(clock.host_hard_ns)}"
    return f"{text}, {how}{host}"
