"""benchmarks/overhead_pipeline.py: what it makes of the times that ranks measured, and of what they recorded."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import pytest
from toolchains import ROOT

from tests.test_flight import SHAPE
from tracekern.comm.group import Group
from tracekern.dump.format import WIDE_RECORD
from tracekern.dump.reader import read_dump
from tracekern.moe.experts import draw_experts
from tracekern.moe.p2p.pipeline import STAGES, P2PPipeline
from tracekern.moe.routing import draw_batch
from tracekern.record.session import capture

sys.path.insert(0, str(ROOT / "benchmarks"))
import harness
import overhead_pipeline

STORED_OF_A_HEADER = 32
"""Bytes: a quarter of it when the track starts, one when it ends (docs/architecture.md)."""


def measured(off_us: list[float], on_us: list[float], mode: str = "device", unrecorded: int = 0) -> dict[str, object]:
    """One rank's row."""
    counted = {"off_queue_us": 1.0, "on_queue_us": 2.0, "records_per_call": 10, "launches_in_device_memory": 1.0}
    return {"tokens": 64, "mode": mode, "off_us": off_us, "on_us": on_us, "unrecorded": unrecorded, **counted}


def test_each_call_takes_as_long_as_its_slowest_rank():
    row = overhead_pipeline.summarise((measured([10, 20, 30], [11, 40, 31]), measured([12, 16, 20], [18, 21, 36])))
    assert (row["off_us"], row["on_us"]) == (20, 36)
    assert row["on_over_off"] == pytest.approx(36 / 20)
    assert row["pair_ratio"] == pytest.approx(sorted([18 / 12, 40 / 20, 36 / 30])[1])
    assert row["records_per_s"] == pytest.approx(10 / 36e-6)


@pytest.mark.parametrize(
    ("mode", "on_us", "unrecorded", "wanted"),
    [
        ("device", 104, 0, []),
        ("host", 150, 0, []),
        ("device", 145, 0, ["64 tokens, device: traced calls take 1.45x; compare the machine code of the two bodies"]),
        ("flight recorder", 101, 3, ["3 traced launches found no room and ran unrecorded: not a measurement"]),
    ],
)
def test_complains_of_what_is_no_measurement_or_broken(mode, on_us, unrecorded, wanted):
    row = overhead_pipeline.summarise((measured([100.0] * 3, [float(on_us)] * 3, mode, unrecorded),))
    assert overhead_pipeline.complaints([row]) == wanted


def test_a_flight_recorder_is_held_to_its_goal_at_256_tokens_alone(capsys):
    ways = [("device", 102.5), ("flight recorder", 103.5), ("host", 130.0)]
    rows = [overhead_pipeline.summarise((measured([100.0] * 3, [on_us] * 3, mode),)) for mode, on_us in ways]
    options = argparse.Namespace(variant="balanced", ranks=1)
    overhead_pipeline.print_table(options, rows)
    assert "goals: 1 of 1 missed" in capsys.readouterr().out
    overhead_pipeline.print_table(options, [{**row, "tokens": 256} for row in rows])
    assert "goals: 2 of 2 missed" in capsys.readouterr().out


@pytest.fixture(scope="module")
def pipeline():
    return P2PPipeline(Group(0, 1), SHAPE, "balanced", num_blocks=2, warps_per_block=2)


@pytest.fixture(scope="module")
def call(pipeline):
    """Runs it in the capture given."""
    batch = draw_batch(SHAPE, seed=3, rank=0, iteration=0, routing="uniform", uneven=False)
    experts = draw_experts(SHAPE)
    return lambda session: pipeline(batch.x, batch.topk_idx, batch.topk_weights, experts, capture=session)


@pytest.mark.parametrize("keep", ["first", "last"])
def test_records_and_bytes_are_those_of_one_call(tmp_path, pipeline, call, keep):
    """counting() reserves regions of the launches to come: they passed for launches of the counted call."""
    with capture(tmp_path, device=pipeline.comm.device, keep=keep, records_per_track=256) as session:
        with session.counting():
            call(session)
        for _ in range(3):
            call(session)
        num_records = overhead_pipeline.records_per_call(session.segment)
        num_bytes = harness.bytes_counted(session.segment)
    launches = read_dump(tmp_path / "rank_00000.tkdump").launches
    assert len(launches) == 3 * len(STAGES["balanced"])
    assert num_records == sum(launch.records_count for launch in launches) // 3
    headers = sum(launch.num_tracks for launch in launches) // 3 * STORED_OF_A_HEADER
    assert num_bytes == num_records * WIDE_RECORD.itemsize + headers


def test_a_flight_recorder_that_has_more_launches_of_one_kernel_tells_the_records_of_a_whole_call(
    tmp_path, pipeline, call
):
    with capture(tmp_path, device=pipeline.comm.device, keep="last", max_bytes=200_000) as session:
        with session.counting():
            call(session)
        for _ in range(20):
            call(session)
        kept = Counter(entry["name"] for entry in session.segment.recorded_launches())
        counted = harness.counted_launches(session.segment)
        attempted = sum(int(session.segment.track_headers(entry)["attempted"].sum()) for entry in counted)
        assert overhead_pipeline.records_per_call(session.segment) == attempted
    assert len(kept) == len(counted)
    assert len(set(kept.values())) > 1
