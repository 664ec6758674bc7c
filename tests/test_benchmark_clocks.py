"""benchmarks/clocks_gpu.py: it sees a clock that is off, and a kernel that lies elsewhere than the profiler says."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from clock_exchanges import SECOND, Clock, sample
from toolchains import ROOT

import tracekern
from tests.captures import CaptureSpec, fill_segment
from tracekern.dump.format import CLOCK_SAMPLE, dump_file_name
from tracekern.moe.run import MoeRun, run
from tracekern.segment.pack import write_dump
from tracekern.timeline.clocks.course import through_anchors
from tracekern.timeline.model import TrackKind

sys.path.insert(0, str(ROOT / "benchmarks"))
import clocks_gpu

ROUNDS, HELD_OUT = 9, {1, 3, 5, 7}
OFF_NS = 400


def leave(directory: Path, off: dict[tuple[int, int], int]) -> Path:
    """Dumps of three ranks that sampled every 2.5 s. off: (round, rank) -> ns by which its clock was off then."""
    rng = np.random.default_rng(8)
    clocks = {rank: Clock.draw(rng, wander=0.0) for rank in range(3)}
    times = [2.5 * SECOND * number for number in range(ROUNDS)]
    rows = sample(rng, clocks, times, pairs=list(itertools.permutations(clocks, 2)), quiet=1.0)
    for (number, rank), ns in off.items():
        for side, stamps in (("initiator", ("t0", "t3")), ("responder", ("t1", "t2"))):
            mine = (rows["round_idx"] == number) & (rows[side] == rank)
            for stamp in stamps:
                rows[stamp][mine] += ns
    for rank in clocks:
        segment = fill_segment(CaptureSpec(num_ranks=3, clock_samples=False, run_id=f"clocks-{directory.name}"), rank)
        try:
            segment.append_clock_samples(rows[rows["initiator"] == rank].astype(CLOCK_SAMPLE))
            write_dump(directory / dump_file_name(rank), segment)
        finally:
            segment.unlink()
            segment.close()
    return directory


def test_sound_clocks_lie_near_the_fit_and_close_all_triangles(tmp_path):
    trips, held_out = clocks_gpu.residuals(leave(tmp_path, {}))
    found = clocks_gpu.medians(trips)
    assert held_out == HELD_OUT
    assert clocks_gpu.steps_of_clocks(tmp_path) == [1] * 3
    assert set(found) == {(0, 1), (0, 2), (1, 2)}
    assert max(abs(value) for rounds in found.values() for value in rounds.values()) < 100
    closures = clocks_gpu.closures(found)
    assert len(closures) == ROUNDS
    assert max(map(abs, closures)) < 100


def test_a_clock_that_was_off_in_a_round_held_out_is_seen_in_its_pairs_alone(tmp_path):
    found = clocks_gpu.medians(clocks_gpu.residuals(leave(tmp_path, {(3, 1): OFF_NS}))[0])
    seen = {(pair, number) for pair, rounds in found.items() for number, value in rounds.items() if abs(value) > 200}
    assert seen == {((0, 1), 3), ((1, 2), 3)}
    assert found[0, 1][3] == pytest.approx(OFF_NS, abs=100)
    assert found[1, 2][3] == pytest.approx(-OFF_NS, abs=100)


def test_pairs_that_do_not_close_are_seen():
    assert clocks_gpu.closures({(0, 1): {0: 5.0}, (1, 2): {0: 7.0}, (0, 2): {0: 12.0}}) == [0.0]
    assert clocks_gpu.closures({(0, 1): {0: 5.0}, (1, 2): {0: 7.0}, (0, 2): {0: -3.0}}) == [15.0]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A folder with a capture, and what a profiler of its ranks would say whose kernels are 500 ns longer each way."""
    directory = tmp_path_factory.mktemp("profiled")
    small = {"ranks": 2, "tokens": 6, "hidden": 64, "experts": 8, "topk": 2, "iterations": 3, "blocks": 2, "warps": 2}
    run(MoeRun(**small, variant="balanced", backend="cpu"), directory / "profiled").raise_for_error()
    timeline = tracekern.load(directory / "profiled")
    on_device = np.array([track.kind is TrackKind.DEVICE for track in timeline.tracks])[timeline.spans.track]
    for rank in timeline.ranks:
        events = []
        for index, launch in enumerate(timeline.launches):
            if launch.rank == rank.rank and launch.name.startswith(("dispatch", "combine")):
                mine = on_device & (timeline.spans.launch == index)
                axis = np.array([timeline.spans.start[mine].min() - 500, timeline.spans.end[mine].max() + 500])
                # Back from the axis to the wall clock.
                start, end = through_anchors(
                    rank.clock.host_axis_ns, rank.clock.host_anchor_ns, axis + timeline.origin_ns
                ).tolist()
                about = {"cat": "kernel", "name": f"p2p_{launch.name}_balanced_wide", "dur": (end - start) / 1e3}
                events.append({**about, "ts": (start - 10**18) / 1e3})
        text = {"baseTimeNanoseconds": 10**18, "traceEvents": events}
        (directory / f"profile_{rank.rank}.json").write_text(json.dumps(text))
    return directory


def test_kernels_inside_what_the_profiler_has_of_them(profiled):
    found = clocks_gpu.containment(profiled)
    assert (found["kernels"], found["outside_hard"]) == (2 * 3 * 4, 0)
    assert found["largest_outside_ns"] == 0
    assert found["median_margin_ns"] == pytest.approx(500, abs=150)  # the file counts in us of 64-bit floats


def test_a_kernel_outside_is_seen(profiled, tmp_path):
    (tmp_path / "profiled").symlink_to(profiled / "profiled")
    text = json.loads((profiled / "profile_0.json").read_text())
    (tmp_path / "profile_0.json").write_text(json.dumps(text))
    other = json.loads((profiled / "profile_1.json").read_text())
    bound_us = clocks_gpu.containment(profiled)["host_hard_ns"] / 1e3
    other["traceEvents"][2]["ts"] += bound_us + 2
    (tmp_path / "profile_1.json").write_text(json.dumps(other))
    found = clocks_gpu.containment(tmp_path)
    assert found["outside_hard"] == 1
    assert found["largest_outside_ns"] == pytest.approx((bound_us + 1.5) * 1e3, abs=300)


def test_a_kernel_is_held_to_the_bound_of_its_own_rank():
    found = clocks_gpu.summarise([(900, 1000.0), (-1100, 1000.0), (-1100, 1200.0), (300, 1200.0)])
    assert (found["kernels"], found["outside_hard"], found["largest_outside_ns"]) == (4, 1, 1100)
    assert (found["median_margin_ns"], found["host_hard_ns"]) == (-400, 1200)
