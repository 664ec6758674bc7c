"""Which memory a kernel's records go to: by the rate at which its counted launches would have recorded."""

from __future__ import annotations

import numpy as np
import pytest

from tracekern.dump import format as fmt
from tracekern.record.sinks import MAX_HOST_STORES_PER_S, STORES_PER_TRACK, SinkChoice


def counted(records: int, duration_ns: int, num_tracks: int = 4) -> np.ndarray:
    headers = np.zeros(num_tracks + 1, fmt.TRACK_HEADER)  # the last track was not selected: it never ran
    headers["start_ticks"][:-1] = 10**15 + np.arange(num_tracks) * duration_ns // (2 * num_tracks)
    headers["end_ticks"][:-1] = 10**15 + duration_ns
    headers["attempted"][:-1] = records // num_tracks
    return headers


@pytest.mark.parametrize(
    ("wanted", "has_mirror", "share", "mirrored"),
    [
        ("auto", True, 0.9, False),
        ("auto", True, 1.1, True),
        ("auto", False, 1.1, False),
        ("host", True, 9.0, False),
        ("device", True, 0.1, True),
    ],
)
def test_the_expected_rate_decides(wanted, has_mirror, share, mirrored):
    sinks = SinkChoice(wanted, has_mirror)
    stores = 4000 + 4 * STORES_PER_TRACK
    sinks.count("kernel", counted(4000, int(stores / (MAX_HOST_STORES_PER_S * share) * 1e9)), {"work"}, 1e9)
    assert sinks.is_mirrored("kernel") == sinks.needs_mirror() == mirrored


@pytest.mark.parametrize(("classes", "mirrored"), [({"work"}, False), ({"work", "wait"}, True), (set(), False)])
def test_what_is_stored_twice_counts_twice(classes, mirrored):
    sinks = SinkChoice("auto", True)
    sinks.count("kernel", counted(4000, int(4000 / (0.7 * MAX_HOST_STORES_PER_S) * 1e9)), classes, 1e9)
    assert sinks.is_mirrored("kernel") == mirrored


def test_the_fastest_of_several_launches_decides_and_a_kernel_nobody_counted_goes_to_the_host():
    sinks = SinkChoice("auto", True)
    sinks.count("never ran", counted(0, 0)[-1:], {"wait"}, 1e9)
    assert not sinks.needs_mirror()
    for duration_ns in (10**6, 10, 10**6):
        sinks.count("kernel", counted(4000, duration_ns), {"work"}, 1e9)
    assert sinks.is_mirrored("kernel")
    assert not sinks.is_mirrored("never ran")
    assert not sinks.is_mirrored("unknown")


@pytest.mark.parametrize(
    ("num_tracks", "duration_ms", "mirrored"), [(2048, 5, True), (2048, 50, False), (512, 5, False)]
)
def test_the_starts_of_thousands_of_tracks_go_to_device_memory_though_the_counted_launch_waited(
    num_tracks, duration_ms, mirrored
):
    """A call of one token: 40 us, but the one that was counted waited milliseconds for ranks that were not in step."""
    sinks = SinkChoice("auto", True)
    sinks.count("kernel", counted(0, duration_ms * 10**6, num_tracks), {"work"}, 1e9)
    assert sinks.is_mirrored("kernel") == mirrored
