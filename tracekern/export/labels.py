"""The words of a picture: what a stranger reads on a trace about its run, its ranks, its clocks and its losses."""

from __future__ import annotations

import math

import numpy as np

from tracekern import __version__
from tracekern.export.drawing import Drawing
from tracekern.export.first_waits import FoundWait
from tracekern.export.overview import Overview
from tracekern.formatting import count, duration
from tracekern.timeline.model import Int64, Problem, Rank, Timeline, Track, TrackKind, count_problems

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


def describe_first_waits(overview: Overview) -> dict[str, str]:
    """The waits that `tracekern open` leads to, by the names under which it looks for them (viewers/perfetto_ui.py)."""
    first = overview.first_waits
    described = {}
    if first.longest:
        described["longest_wait"] = _describe_wait(overview, first.longest, first.when)
    if first.outlier:
        described["outlier_wait"] = _describe_wait(overview, first.outlier, first.outlier_when)
    return described


def _describe_wait(overview: Overview, wait: FoundWait, when: str) -> str:
    """Where the wait is and what released it."""
    end = ", never ended" if wait.is_open else ""
    tables = overview.tables
    by = f"; released by {describe_place(tables, wait.by_track, wait.by_event)}" if wait.by_track >= 0 else ""
    place, lasts = describe_place(tables, wait.track, wait.event), f"{duration(wait.wait_ns)} {when}".strip()
    return f"ts {wait.start_ns + overview.time_shift} dur {wait.wait_ns} ({place}, {lasts}{end}{by})"


def marks_of_longest_wait(overview: Overview) -> dict[int, str]:
    """The tracks of the longest wait and of the signal that released it, each with what to put before its name.

    `tracekern open` pins rows by these words (viewers/perfetto_ui.py); SQL leaves them out (viewers/sql/tk_wait.sql).
    """
    wait = overview.first_waits.longest
    if not wait:
        return {}
    words = {wait.by_track: "released it"} | {wait.track: "longest wait"}
    return {track: f"{text}: {_rank_of(overview.tables, track)} · " for track, text in words.items() if track >= 0}


def describe_spans(overview: Overview) -> str:
    """ "250000": the spans and marks that are drawn, for `tracekern open`."""
    return str(overview.num_spans + overview.num_marks)


def describe_flows(overview: Overview) -> str:
    """ "5000 of 36556": the arrows that are drawn, of those that could be; `tracekern open` reads the first number."""
    return f"{overview.num_drawn} of {overview.num_drawable}"


def describe_place(timeline: Timeline, track_idx: int, event_idx: int) -> str:
    """ "rank 1 block 015 warp 03 send: signal_token", for a span of a kernel."""
    place = f"{_rank_of(timeline, track_idx)} {flat_label(timeline.tracks[track_idx], 1)}"
    return f"{place}: {timeline.events[event_idx].name}"


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
    places = zip(spans.track[signals[first]].tolist(), spans.event[signals[first]].tolist(), strict=True)
    return [describe_place(drawing.timeline, *place) for place in places], which


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
