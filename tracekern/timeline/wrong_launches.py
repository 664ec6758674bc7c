"""Launches whose kernel ran otherwise than capture.launch() was told: mistakes that nothing else shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekern.timeline.model import Launch, Problem
from tracekern.timeline.record_columns import Runs


def wrong_launches(launches: Sequence[Launch], runs: Runs) -> list[Problem]:
    """One problem for each kernel, grid and mistake, the launches of one rank counted together."""
    num_started = np.bincount(runs.launch[runs.started], minlength=len(launches)).tolist()
    warps_run = np.zeros(len(launches), np.int64)
    np.maximum.at(warps_run, runs.launch, runs.warps_run)
    found: dict[tuple[str, str, str], list[Launch]] = {}
    for launch, started, warps in zip(launches, num_started, warps_run.tolist(), strict=True):
        for kind, why in _mistakes(launch, started, warps):
            found.setdefault((launch.name, kind, why), []).append(launch)
    return [
        Problem(
            "error" if kind == "surplus_warps" else "note",
            kind,
            alike[0].rank,
            -1,
            f"rank {alike[0].rank}: {len(alike)} launches of {name} {why}",
            len(alike),
        )
        for (name, kind, why), alike in found.items()
    ]


def _mistakes(launch: Launch, num_started: int, warps_run: int) -> list[tuple[str, str]]:
    told = launch.warps_per_block
    if warps_run > told:
        return [
            (
                "surplus_warps",
                f"ran with {warps_run} warps a block; those above {told} recorded nothing: "
                f"pass warps={warps_run} to capture.launch()",
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
    if num_started < launch.num_tracks:
        return [
            (
                "idle_tracks",
                f"left {launch.num_tracks - num_started} of {launch.num_tracks} tracks empty: fewer "
                f"blocks or warps ran than grid={launch.num_blocks}, warps={told} say, or they made no recorder",
            )
        ]
    return []
