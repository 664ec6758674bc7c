"""What a reader of a decoded dump should know: losses, spans that never closed, torn tracks.

Among them launches whose kernel ran otherwise than capture.launch() stated: mistakes that nothing else shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracekern.dump.reader import Dump
from tracekern.formatting import count, duration
from tracekern.timeline.decode.record_columns import WriterRuns
from tracekern.timeline.decode.track_merge import TrackMerge
from tracekern.timeline.model import OPEN_END, Int32, Launch, Problem, Timeline

HELD_UP_NS = 50_000
"""Waits for the recorder are reported if they take this long; benchmarks/results/launch.json has the usual time."""

_ERRORS = ("surplus_warps", "surplus_blocks", "shared_tracks", "keeps_first", "keeps_last")

_WRONG_BODY = {
    "first": (
        "keeps_last",
        "kept the last records of a track, not the first, as keep='first' asks: "
        "launch the body that with_recorder(launch.descriptor, ...) picks",
    ),
    "last": (
        "keeps_first",
        "kept the first records of a track, not the last, as keep='last' asks: "
        "launch the body that with_recorder(launch.descriptor, ...) picks",
    ),
}
"""Text about a body that keeps the other end of a track than the capture was asked for, by what it was asked for."""


def wrong_launches(launches: Sequence[Launch], runs: WriterRuns, metadata: Mapping[str, Any]) -> list[Problem]:
    """One problem for each kernel, grid and mistake, the launches of one rank counted together.

    metadata: of the rank's dump, which says how the capture was asked for.
    """
    keep, selects_roles = str(metadata.get("keep")), metadata.get("roles") is not None
    num_started = np.bincount(runs.launch[runs.started], minlength=len(launches)).tolist()
    warps_run = np.zeros(len(launches), np.int64)
    np.maximum.at(warps_run, runs.launch, runs.warps_run)
    is_of_other_body = {"first": runs.ring, "last": ~runs.ring}.get(keep, False)
    num_wrong = np.bincount(runs.launch[runs.started & is_of_other_body], minlength=len(launches))
    untraced = {lacked["name"] for lacked in metadata.get("lacking_bodies", [])}  # a problem says why
    found: dict[tuple[str, str, str], list[Launch]] = {}
    columns = (num_started, warps_run.tolist(), num_wrong.tolist())
    for launch, started, warps, wrong in zip(launches, *columns, strict=True):
        if not started and launch.name in untraced:
            continue
        mistakes = _mistakes(launch, started, warps, selects_roles) + _several_recorders(launch.shared_tracks)
        mistakes += [_WRONG_BODY[keep]] if wrong else []
        for kind, why in mistakes:
            found.setdefault((launch.name, kind, why), []).append(launch)
    return [
        Problem(
            "error" if kind in _ERRORS else "note",
            kind,
            alike[0].rank,
            -1,
            f"rank {alike[0].rank}: {count(len(alike), 'launch')} of {name} {why}",
            len(alike),
        )
        for (name, kind, why), alike in found.items()
    ]


def _mistakes(launch: Launch, num_started: int, warps_run: int, selects_roles: bool) -> list[tuple[str, str]]:
    told = launch.warps_per_block
    if warps_run > told:
        return [
            (
                "surplus_warps",
                f"ran with {warps_run} warps a block; those above {told} recorded nothing: "
                f"pass warps={warps_run} to capture.launch()",
            )
        ]
    if launch.blocks_run:
        return [
            (
                "surplus_blocks",
                f"ran with {launch.blocks_run} blocks; those from block {launch.num_blocks} on recorded nothing: "
                f"pass grid={launch.blocks_run} to capture.launch()",
            )
        ]
    if not launch.num_tracks:
        return [("silent_launch", f"recorded nothing: blocks= selects none of its {launch.num_blocks}")]
    if not num_started:
        return [
            (
                "silent_launch",
                "recorded nothing: the kernel did not get launch.descriptor, never ran, or has no "
                "warp of the selected roles",
            )
        ]
    if num_started < launch.num_tracks and not selects_roles:  # a track says its role only where it is recorded
        return [
            (
                "idle_tracks",
                f"left {launch.num_tracks - num_started} of {launch.num_tracks} tracks empty: fewer "
                f"blocks or warps ran than grid={launch.num_blocks}, warps={told} say, or they made no recorder",
            )
        ]
    return []


def _several_recorders(shared_tracks: int) -> list[tuple[str, str]]:
    if not shared_tracks:
        return []
    return [
        (
            "shared_tracks",
            f"had several writers of {count(shared_tracks, 'track')}, and lost what they overwrote: a warp has one "
            "recorder, which its functions get by reference, and a descriptor is for one launch",
        )
    ]


_NO_TRACKS = np.empty(0, np.int32)


@dataclass(frozen=True)
class Seen:
    """What decoding saw on its way; the lists collect one track index per occurrence, batch by batch."""

    runs: WriterRuns
    merge: TrackMerge
    orphans: list[Int32] = field(default_factory=list)
    strange: list[Int32] = field(default_factory=list)
    backwards: list[Int32] = field(default_factory=list)


def find_problems(timeline: Timeline, dump: Dump, seen: Seen) -> tuple[Problem, ...]:
    problems = _whole_rank(dump)
    problems += _losses(timeline, seen)
    problems += _overwritten(dump, seen.runs)
    problems += held_up(timeline)
    problems += _open_spans(timeline, seen)
    problems += _open_work(dump.rank, seen.runs)
    problems += wrong_launches(timeline.launches, seen.runs, dump.metadata)
    problems += _unknown_roles(dump, seen.runs)
    rank = dump.rank
    for tracks, severity, kind, thing, what in (
        (seen.orphans, "error", "orphan_end", "end", "without a begin"),
        (seen.strange, "error", "torn_track", "record", "of no known kind"),
        (seen.backwards, "error", "torn_track", "step", "back in time; raised to the time before"),
        ([seen.merge.overlapping], "warning", "overlapping_launches", "overlap", "of launches of one stream"),
    ):
        for track, number in zip(*_count(np.concatenate([_NO_TRACKS, *tracks])), strict=True):
            text = f"{_where(timeline, track)}: {count(number, thing)} {what}"
            problems.append(Problem(severity, kind, rank, track, text, number))
    return tuple(problems)


def _whole_rank(dump: Dump) -> list[Problem]:
    metadata, rank = dump.metadata, dump.rank
    problems = []
    is_running = metadata["state"] == "running"
    if is_running:
        text = f"rank {rank} was still running: this is what it had recorded by then"
        problems.append(Problem("note", "running", rank, -1, text))
    elif metadata["state"] == "salvaged":
        why = f"killed by {killed_by}" if (killed_by := metadata.get("killed_by")) else "killed or crashed"
        text = f"rank {rank} never closed its capture: {why}; its last records were salvaged"
        problems.append(Problem("error", "salvaged", rank, -1, text))
    device_records = "to come when the capture closes; take keep='last'" if is_running else "gone; take sink='host'"
    if metadata.get("fault_text"):
        problems.append(Problem("error", "fault", rank, -1, _fault_text(metadata)))
    if refused := metadata["launches_refused"]:
        why = (
            metadata.get("refused_text")
            or f"{count(refused, 'launch')} found no room and ran unrecorded; raise max_bytes"
        )
        problems.append(Problem("error", "launch_not_recorded", rank, -1, f"rank {rank}: {why}", refused))
    if counted := metadata.get("counted_text"):
        problems.append(
            Problem("warning", "counted_only", rank, -1, f"rank {rank}: {counted}", metadata.get("launches_counted", 0))
        )
    for lacked in metadata.get("lacking_bodies", []):
        text = f"rank {rank}: {lacked['text']}"
        problems.append(Problem("error", "lacking_body", rank, -1, text, lacked["launches"]))
    for key, kind, thing, what in (
        ("launches_lost", "launch_lost", "launch", f"recorded in device memory, {device_records}"),
        ("clock_samples_lost", "lost_clock_samples", "clock sample", "found no room"),
    ):
        if number := metadata.get(key):
            problems.append(Problem("error", kind, rank, -1, f"rank {rank}: {count(number, thing)} {what}", number))
    if lost := metadata.get("host_spans_lost"):
        problems.append(_lost_host_spans(rank, lost, keeps_last=metadata.get("keep") == "last"))
    return problems


def _fault_text(metadata: Mapping[str, Any]) -> str:
    text, num_residents = str(metadata["fault_text"]), metadata.get("num_residents", 1)
    has_trapped = (metadata.get("fault") or {}).get("on_timeout") == "trap"
    if has_trapped and num_residents > 1 and metadata["backend"] != "cpu":
        text += f"; that ended all {num_residents} ranks, which are resident on one GPU"
    return text


def _lost_host_spans(rank: int, lost: int, keeps_last: bool) -> Problem:
    severity, what = "error", "found no room; raise host_spans"
    if keeps_last:
        severity, what = "note", "gave their place to later ones; raise host_spans to keep more"
    return Problem(severity, "lost_host_spans", rank, -1, f"rank {rank}: {count(lost, 'host range')} {what}", lost)


def _losses(timeline: Timeline, seen: Seen) -> list[Problem]:
    """One problem for each launch and one for each track that lost records."""
    runs, rank = seen.runs, timeline.ranks[0].rank
    problems = [
        Problem(
            "error",
            "lost_records",
            launch.rank,
            -1,
            f"rank {launch.rank} launch {launch.name} #{launch.sequence}: {count(launch.records_lost, 'record')} found "
            f"no room with {launch.records_per_track} a track; {launch.records_needed} would have been enough",
            launch.records_lost,
        )
        for launch in timeline.launches
        if launch.records_lost and launch.records_per_track
    ]
    per_track = np.array([launch.records_per_track for launch in timeline.launches], np.int64)[runs.launch]
    lost = np.where(per_track > 0, runs.lost, 0)
    of_track = np.zeros(len(timeline.tracks), np.int64)
    needed = np.zeros(len(timeline.tracks), np.int64)
    lossy = np.flatnonzero(lost)
    np.add.at(of_track, seen.merge.track[lossy], lost[lossy])
    np.maximum.at(needed, seen.merge.track[lossy], runs.attempted[lossy])
    for track in np.flatnonzero(of_track).tolist():
        lost_here = count(int(of_track[track]), "record")
        text = f"{_where(timeline, track)}: {lost_here} lost; {needed[track]} would have been enough"
        problems.append(Problem("error", "lost_records", rank, track, text, int(of_track[track])))
    cut = np.flatnonzero(~runs.finished & ~runs.ring & (per_track > 0) & (runs.written == per_track))
    for track, number in zip(*_count(seen.merge.track[cut]), strict=True):
        text = f"{_where(timeline, track)}: never finished and its region is full: later records are missing"
        problems.append(Problem("error", "torn_track", rank, track, text, number))
    return problems


def held_up(timeline: Timeline) -> list[Problem]:
    """One note for a rank on a GPU whose launches waited for the recorder long enough to make other ranks wait."""
    waited_ns = sorted(launch.waited_ns for launch in timeline.launches if launch.waited_ns >= HELD_UP_NS)
    rank = timeline.ranks[0]
    if not waited_ns or rank.backend == "cpu":  # whose kernels run on the host
        return []
    typical, longest = duration(waited_ns[len(waited_ns) // 2]), duration(waited_ns[-1])
    text = (
        f"rank {rank.rank}: the recorder held up {count(len(waited_ns), 'launch')} by {typical}, at most {longest}; "
        "run the same launches inside capture.counting() first"
    )
    return [Problem("note", "held_up_launch", rank.rank, -1, text, len(waited_ns))]


def _overwritten(dump: Dump, runs: WriterRuns) -> list[Problem]:
    """What a flight recorder does all the time: one note a rank. What it should not: records that never arrived."""
    rank, problems = dump.rank, []
    if overwritten := int(runs.overwritten.sum()):
        launches = count(len(np.unique(runs.launch[runs.overwritten > 0])), "launch")
        asked = "" if dump.metadata.get("keep") == "first" else ", as keep='last' asks"
        text = f"rank {rank}: {count(overwritten, 'older record')} of {launches} overwritten{asked}"
        problems.append(Problem("note", "overwritten_records", rank, -1, text, overwritten))
    torn_of = np.where(runs.ring, runs.missing, 0)
    if torn := int(torn_of.sum()):
        tracks = count(int((torn_of > 0).sum()), "track")
        text = f"rank {rank}: {count(torn, 'record')} never arrived in {tracks}: torn when it died"
        problems.append(Problem("warning", "torn_track", rank, -1, text, torn))
    return problems


def _unknown_roles(dump: Dump, runs: WriterRuns) -> list[Problem]:
    """One warning a kernel whose recorders took a role that its roles= does not name."""
    num_roles = np.array([len(dump.metadata["role_tables"][launch.role_table]) for launch in dump.launches], np.int64)
    beyond = np.flatnonzero(runs.started & (runs.role >= num_roles[runs.launch]) & (num_roles[runs.launch] > 0))
    found = {(dump.launches[runs.launch[run]].name, int(runs.role[run])) for run in beyond.tolist()}
    why = ", for which roles= of capture.launch() has no name"
    return [
        Problem("warning", "unknown_role", dump.rank, -1, f"rank {dump.rank}: {name} has tracks of role {role}{why}")
        for name, role in sorted(found)
    ]


def _open_spans(timeline: Timeline, seen: Seen) -> list[Problem]:
    """Spans that never closed: what a hung kernel was doing, or what a full region could not say any more."""
    runs, spans = seen.runs, timeline.spans
    opened = np.flatnonzero(spans.end == OPEN_END)
    full = runs.lost > 0
    full_pairs = set(zip(seen.merge.track[full].tolist(), runs.launch[full].tolist(), strict=True))
    names: dict[tuple[int, int, str], list[str]] = {}
    for row in opened.tolist():
        track, launch = int(spans.track[row]), int(spans.launch[row])
        kind = "lost_end" if (track, launch) in full_pairs else "open_span"
        names.setdefault((track, launch, kind), []).append(timeline.events[spans.event[row]].name)
    alike: dict[tuple[int, str, tuple[str, ...]], int] = {}
    for (track, _, kind), found in names.items():
        key = (track, kind, tuple(found))
        alike[key] = alike.get(key, 0) + 1
    problems = []
    for (track, kind, nested), num_launches in alike.items():
        path = " > ".join(nested[:4]) + (" ..." if len(nested) > 4 else "")
        why = "its end found no room" if kind == "lost_end" else "never closed"
        where = f", in {num_launches} launches" if num_launches > 1 else ""
        severity = "warning" if kind == "lost_end" else "error"
        text = f"{_where(timeline, track)}: {path} {why}{where}"
        problems.append(Problem(severity, kind, timeline.ranks[0].rank, track, text, len(nested) * num_launches))
    return problems


def _open_work(rank: int, runs: WriterRuns) -> list[Problem]:
    """Work that had begun in tracks that never finished: it is stored when it ends, so only its place is known."""
    held = np.where(runs.is_span, runs.missing, 0)
    if not (number := int(held.sum())):
        return []
    tracks = count(int((held > 0).sum()), "track")
    text = f"rank {rank}: {count(number, 'span')} of work had begun and not ended in {tracks} that never finished"
    return [Problem("error", "open_work", rank, -1, text, number)]


def _count(tracks: Int32) -> tuple[list[int], list[int]]:
    values, counts = np.unique(tracks, return_counts=True)
    return values.tolist(), counts.tolist()


def _where(timeline: Timeline, track: int) -> str:
    if track < 0:
        return f"rank {timeline.ranks[0].rank}"
    entry = timeline.tracks[track]
    return f"rank {entry.rank} {entry.name}" + (f" ({entry.role})" if entry.role else "")
