"""What of traced graphs needs no GPU: the first node on the CPU backend, and how a segment shows a graph's regions."""

from __future__ import annotations

import os
import subprocess

import pytest
from toolchains import program

from tests.captures import CaptureSpec, metadata
from tests.test_segment import plan
from tracekern.errors import BadInput
from tracekern.record import format as fmt
from tracekern.record.dump import read_dump
from tracekern.record.pack import write_dump
from tracekern.record.segment import Segment
from tracekern.record.session import capture


def test_the_first_node_hands_out_regions_and_counts_what_it_cannot():
    done = subprocess.run([program("graph", "-O1")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_dump_shows_the_regions_that_a_replay_took(tmp_path):
    segment = Segment.create(f"graph-test-{os.getpid()}", 0, metadata(CaptureSpec(), 0), 1 << 20)
    try:
        regions = segment.reserve_regions(plan(flags=fmt.ENTRY_IN_GRAPH), 4)
        for region, replay in zip(regions, (3, 1, 0, 2), strict=True):
            segment.descriptors(region.offset)["replay"] = replay
        write_dump(tmp_path / "rank_00000.tkdump", segment)
    finally:
        segment.unlink()
        segment.close()
    launches = read_dump(tmp_path / "rank_00000.tkdump").launches
    assert [(entry.launch_idx, entry.sequence) for entry in launches] == [(1, 0), (3, 1), (0, 2)]


def test_a_graph_needs_a_gpu(tmp_path):
    with capture(tmp_path, device="cpu") as session, pytest.raises(BadInput, match="cpu backend has no graphs"):
        session.graph(lambda: None)
