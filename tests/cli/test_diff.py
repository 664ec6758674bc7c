"""`tracekern diff`: the table, and one trace of both captures in which a launch starts at the same time."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from captures import CaptureSpec, write_capture
from launched import record
from timelines import make_timeline
from trace_processor import TraceProcessor, assert_no_loss

import tracekern
from tracekern.errors import BadInput
from tracekern.timeline.join.side_by_side import side_by_side
from tracekern.timeline.model import OPEN_END, TrackKind, clocks_of_ranks
from tracekern.timeline.select import take_spans

SPEC = CaptureSpec(num_ranks=3, launches=3, host_spans=2)


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Two captures of one program, the second with two ranks and another clock."""
    directory = tmp_path_factory.mktemp("pair")
    second = CaptureSpec(num_ranks=2, launches=4, run_id="second", host_spans=1, killed_rank=1)
    return write_capture(directory / "a", SPEC), write_capture(directory / "b", second)


def without_lane(timeline, sequence: int):
    """The timeline as if that launch of demo_kernel had left nothing."""
    is_gone = np.array([launch.sequence == sequence for launch in timeline.launches])[timeline.spans.launch]
    return take_spans(timeline, ~(is_gone & (timeline.spans.launch >= 0)))


def test_a_launch_that_left_nothing_is_not_the_one_to_align_at(pair):
    first, second = map(tracekern.load, pair)
    both = side_by_side(without_lane(first, 1), second)
    assert launch_start(both, {0, 1, 2}, "demo_kernel", 0) == launch_start(both, {3, 4}, "demo_kernel", 0)


def launch_start(timeline, ranks: set[int], name: str, sequence: int) -> int:
    chosen = [i for i, launch in enumerate(timeline.launches) if launch.sequence == sequence and launch.name == name]
    of_lane = np.array([t.kind == TrackKind.LAUNCH and t.rank in ranks for t in timeline.tracks])
    spans = timeline.spans
    return int(spans.start[of_lane[spans.track] & np.isin(spans.launch, chosen)].min())


def test_both_sides_keep_all_they_had_and_start_together(pair):
    first, second = map(tracekern.load, pair)
    both = side_by_side(first, second)
    assert [rank.label for rank in both.ranks] == ["A rank 0", "A rank 1", "A rank 2", "B rank 0", "B rank 1"]
    assert len({rank.rank for rank in both.ranks}) == 5
    num_first = len(first.spans)
    for side, part in ((first, slice(0, num_first)), (second, slice(num_first, None))):
        spans = both.spans.take(part)
        shift = np.unique(spans.start - side.spans.start)
        assert len(shift) == 1, "a side moves as a whole"
        was_open = side.spans.end == OPEN_END
        assert (spans.end[was_open] == OPEN_END).all()
        assert (spans.end[~was_open] - side.spans.end[~was_open] == shift[0]).all()
        names, new_names = ([event.name for event in timeline.events] for timeline in (side, both))
        assert [names[e] for e in side.spans.event] == [new_names[e] for e in spans.event]
        assert (spans.begin_payload == side.spans.begin_payload).all()
    assert launch_start(both, {0, 1, 2}, "demo_kernel", 1) == launch_start(both, {3, 4}, "demo_kernel", 1)
    assert len(both.flows) == len(first.flows) + len(second.flows)
    ranks = both.track_ranks()[both.spans.track]
    sides = [ranks[flows] < 3 for flows in (both.flows.signal, both.flows.wait)]
    assert (sides[0] == sides[1]).all(), "no arrow leads from one capture into the other"
    assert int(both.spans.start.min()) == 0


def test_at_another_launch(pair):
    both = side_by_side(*map(tracekern.load, pair), at=("demo_kernel", 2))
    assert launch_start(both, {0, 1, 2}, "demo_kernel", 2) == launch_start(both, {3, 4}, "demo_kernel", 2)
    with pytest.raises(BadInput, match="A has no launch 3 of 'demo_kernel'"):
        side_by_side(*map(tracekern.load, pair), at=("demo_kernel", 3))


def test_sides_that_have_nothing_in_common(tmp_path, pair):
    with pytest.raises(BadInput, match="no launch in common"):
        side_by_side(tracekern.load(pair[0]), tracekern.load(record(tmp_path / "other")))
    with pytest.raises(BadInput, match="in ticks"):
        side_by_side(make_timeline(unit="ticks"), make_timeline())


def test_an_unaligned_side_makes_both_unaligned(pair):
    first, second = map(tracekern.load, pair)
    assert not side_by_side(first.replace(aligned=False), second).aligned


def test_perfetto_shows_both_sides(command_line, pair, tmp_path):
    trace = tmp_path / "both.pftrace.gz"
    result = command_line("diff", *pair, "-o", trace)
    assert result.returncode == 0, result.stderr
    processor = TraceProcessor(trace)
    assert_no_loss(processor)
    rows = processor.query(
        "select rank.name, min(slice.ts) from slice join track on slice.track_id = track.id "
        "join track rank on rank.id = track.id where slice.name = 'demo_kernel' group by rank.name order by rank.name"
    )
    names = [str(name) for name, _ in rows]
    assert [name.split(" clock")[0].split(" ±")[0].split(" SALV")[0] for name in names] == [
        "A rank 0", "A rank 1", "A rank 2", "B rank 0", "B rank 1",
    ]  # fmt: skip
    counts = dict(processor.query("select name, count(*) from slice group by name"))
    both = [tracekern.load(path) for path in pair]
    event_names = [[timeline.events[e].name for e in timeline.spans.event.tolist()] for timeline in both]
    assert counts["copy_token"] == sum(names.count("copy_token") for names in event_names)


def test_the_table_and_its_caveat(command_line, pair):
    result = command_line("diff", *pair)
    assert result.returncode == 0
    assert "demo_kernel.wait_token" in result.stdout
    assert "one run a side proves nothing" in result.stdout
    assert re.search(r"different shapes: .* in A, .* in B$", result.stderr, re.MULTILINE)
    assert "B proves nothing" in result.stderr
    report = json.loads(command_line("diff", *pair, "--json").stdout)
    assert {row["metric"] for row in report["differences"]} > {"demo_kernel.wait_token.p50", "end_to_end.p50"}


def test_sides_of_one_clock_are_shifted_and_so_are_two(pair):
    first, second = (
        timeline.replace(ranks=tuple(dataclasses.replace(rank, clock_id="GPU a") for rank in timeline.ranks))
        for timeline in map(tracekern.load, pair)
    )
    assert clocks_of_ranks(side_by_side(first, second).ranks).tolist() == [0, 0, 0, 3, 3, -1]
