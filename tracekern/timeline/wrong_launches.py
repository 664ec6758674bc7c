"""Launches whose kernel ran otherwise than capture.launch() was told: mistakes that nothing else shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tracekern.timeline.model import Launch, Problem
from tracekern.timeline.record_columns import Runs
from tracekern.words import count

_ERRORS = ("surplus_warps", "surplus_blocks", "shared_tracks", "keeps_first", "keeps_last")

_WRONG_BODY = {
    "first": (
        "keeps_last",
        "kept the last records of a track, not the first, as keep='first' asks: "
        "launch the body of launch.record_format, Recorder<true>",
    ),
    "last": (
        "keeps_first",
        "kept the first records of a track, not the last, as keep='last' asks: "
        "launch the body of launch.record_format, Recorder<true, RecordFormat::ring>",
    ),
}
"""By what the capture was asked to keep: of a body that keeps the other end."""


def wrong_launches(launches: Sequence[Launch], runs: Runs, metadata: Mapping[str, Any]) -> list[Problem]:
    """One problem for each kernel, grid and mistake, the launches of one rank counted together.

    metadata: of the rank's dump, which says how the capture was asked for.
    """
    keep, selects_roles = str(metadata.get("keep")), metadata.get("roles") is not None
    num_started = np.bincount(runs.launch[runs.started], minlength=len(launches)).tolist()
    warps_run = np.zeros(len(launches), np.int64)
    np.maximum.at(warps_run, runs.launch, runs.warps_run)
    is_of_other_body = {"first": runs.ring, "last": ~runs.ring}.get(keep, False)
    num_wrong = np.bincount(runs.launch[runs.started & is_of_other_body], minlength=len(launches))
    found: dict[tuple[str, str, str], list[Launch]] = {}
    columns = (num_started, warps_run.tolist(), num_wrong.tolist())
    for launch, started, warps, wrong in zip(launches, *columns, strict=True):
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
