"""Which role a warp had in the kernel that a span is of: a track holds the spans of several kernels."""

from __future__ import annotations

import numpy as np

from tracekern.timeline.model import Int32, Marks, Spans, Timeline


def roles_of(timeline: Timeline, rows: Spans | Marks) -> tuple[Int32, tuple[str, ...]]:
    """Returns [num_rows] the number of each row's role, and the names of all roles, sorted."""
    tracks, launches = timeline.tracks, timeline.launches
    found = {track.role for track in tracks} | {role for track in tracks for _, role in track.kernel_roles}
    names = tuple(sorted(found))
    number = {name: idx for idx, name in enumerate(names)}
    roles = np.array([number[track.role] for track in tracks], np.int32)[rows.track]
    mixed = [idx for idx, track in enumerate(tracks) if track.kernel_roles]
    if not mixed:
        return roles, names
    kernels = {name: idx for idx, name in enumerate(sorted({launch.name for launch in launches}))}
    kernel = np.array([*(kernels[launch.name] for launch in launches), -1], np.int64)[rows.launch]
    place_of_track = np.full(len(tracks), -1, np.int64)
    place_of_track[mixed] = np.arange(len(mixed))
    table = np.full((len(mixed), len(kernels)), -1, np.int32)
    for own_row, idx in zip(table, mixed, strict=True):
        for name, role in tracks[idx].kernel_roles:
            if name in kernels:
                own_row[kernels[name]] = number[role]
    place = place_of_track[rows.track]
    which = np.flatnonzero((place >= 0) & (kernel >= 0))
    own = table[place[which], kernel[which]]
    roles[which] = np.where(own >= 0, own, roles[which])
    return roles, names
