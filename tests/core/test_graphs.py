"""What of traced graphs needs no GPU: the first node on the CPU backend, and how a segment shows a graph's regions."""

from __future__ import annotations

import os
import subprocess

import pytest
from toolchains import program

from tests.captures import CaptureSpec, metadata, plan, reserve_launch
from tracekern.dump import format as fmt
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.record.session import capture
from tracekern.segment.pack import write_dump
from tracekern.segment.writer import SegmentWriter


@pytest.mark.programs("tests/cpp/graph.cpp")
def test_replays_get_regions_and_what_finds_none_is_counted():
    done = subprocess.run(
        [program("graph", "-O1", "-g1", "-fsanitize=thread")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_dump_shows_the_regions_that_a_replay_took(tmp_path):
    segment = SegmentWriter.create(f"graph-test-{os.getpid()}", 0, metadata(CaptureSpec(), 0), 1 << 20)
    try:
        for _ in range(2):
            reserve_launch(segment, plan())
        regions = segment.reserve_regions(plan(flags=fmt.ENTRY_IN_GRAPH), 4)
        for region, replay in zip(regions, (3, 1, 0, 2), strict=True):
            segment.descriptor(region.offset)["replay"] = replay
        write_dump(tmp_path / "rank_00000.tkdump", segment)
    finally:
        segment.unlink()
        segment.close()
    launches = read_dump(tmp_path / "rank_00000.tkdump").launches
    assert [entry.launch_idx for entry in launches] == [0, 1, 3, 5, 2], "behind the launches before them"
    assert [entry.sequence for entry in launches[2:]] == [0, 1, 2]


def test_a_graph_needs_a_gpu(tmp_path):
    with capture(tmp_path, device="cpu") as session, pytest.raises(BadInput, match="cpu backend has no graphs"):
        session.graph(lambda: None)
