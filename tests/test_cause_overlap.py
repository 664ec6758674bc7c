"""Kernels of one stream that overlap, as with programmatic dependent launch: each is charged with its own time."""

from __future__ import annotations

import numpy as np
import pytest
from scenarios import EVENTS, NUMBER
from timelines import make_launch, make_rank, make_spans

from tracekern.analysis.causes.analyze import analyze_causes
from tracekern.analysis.waits.analyze import Phase, analyze_waits
from tracekern.timeline.flows import join_flows
from tracekern.timeline.model import Timeline, Track, TrackKind


def test_of_a_kernel_that_runs_on_only_what_it_did_before_the_next_one_began_is_its_past():
    """Rank 0 copies 10 us, then its next kernel works 40 us beside that and signals; rank 1 copied 5 us and waits."""
    first, second, other = range(3)
    tracks = tuple(Track(rank, TrackKind.DEVICE, f"warp {warp}", warp=warp) for rank, warp in ((0, 0), (0, 1), (1, 0)))
    rows = [
        (first, "copy_token", 0, 0, 100_000, 0),
        (second, "receive_token", 1, 10_000, 50_000, 0),
        (second, "signal_token", 1, 50_000, 50_040, 1),
        (other, "copy_token", 2, 0, 5_000, 0),
        (other, "wait_token", 3, 11_000, 50_060, 0),
    ]
    timeline = Timeline(
        unit="ns",
        ranks=(make_rank(0), make_rank(1)),
        tracks=tracks,
        events=EVENTS,
        launches=tuple(make_launch(rank, name) for rank in (0, 1) for name in ("send", "receive")),
        spans=make_spans((track, NUMBER[name], *times, payload, 0) for track, name, *times, payload in rows),
    )
    timeline = timeline.replace(flows=join_flows(timeline)[0])
    costs = {cost.phase: cost.total_ns for cost in analyze_causes(timeline, analyze_waits(timeline)).costs}
    late_ns, longer = 39_000, np.array([40_000, 10_000 - 5_000])
    receive, copy = (late_ns * longer / longer.sum()).tolist()
    assert costs[Phase("receive", "receive_token")] == pytest.approx(receive, rel=1e-3)  # the link's 60 ns
    assert costs[Phase("send", "copy_token")] == pytest.approx(copy, rel=1e-3)
