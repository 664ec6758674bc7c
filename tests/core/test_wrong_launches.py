"""Kernels that ran otherwise than capture.launch() was told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.captures import EVENT_TABLE
from tests.kernels import TrackWriter, descriptor_of, memory, run_kernel
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.summary import summarize
from tracekern.analysis.statistics import phase_statistics
from tracekern.cli.commands.info import print_summary
from tracekern.dump import format as fmt
from tracekern.errors import BadInput
from tracekern.record.session import capture
from tracekern.timeline.load import load
from tracekern.viewers.report.headlines import headlines


def problems_of(
    directory: Path, warps: int = 2, run_warps: int = 2, run_grid: int = 4, body: int = -1, **selection
) -> list[tuple]:
    """What is said of three launches with 4 blocks; their warps record two spans each.

    body: a mask for the descriptor, whose lowest bit asks for the body of a ring.
    """
    with capture(directory, **selection) as session:
        for _ in range(3):
            launched = session.launch("demo", grid=4, warps=warps, events=json.dumps(EVENT_TABLE))
            run_kernel(launched.descriptor & body, run_grid, run_warps, 2)
    return [(problem.severity, problem.kind, problem.count, problem.text) for problem in load(directory).problems]


def test_as_told_nothing_is_said(tmp_path: Path):
    assert problems_of(tmp_path) == []


@pytest.mark.parametrize(
    ("ran", "text"),
    [
        ({"run_warps": 1}, "left 4 of 8 tracks empty: fewer blocks or warps ran than grid=4, warps=2 say"),
        ({"run_grid": 3}, "left 2 of 8 tracks empty"),
        ({"run_grid": 0}, "recorded nothing: the kernel did not get launch.descriptor"),
        ({"blocks": slice(10, 20)}, "recorded nothing: blocks= selects none of its 4"),
    ],
)
def test_tracks_that_nobody_began_are_noted_once_a_kernel(tmp_path: Path, ran: dict, text: str):
    ((severity, kind, count, said),) = problems_of(tmp_path, **ran)
    assert (severity, kind, count) == ("note", "idle_tracks" if "tracks" in text else "silent_launch", 3)
    assert said.startswith(f"rank 0: 3 launches of demo {text}")


def test_tracks_that_the_selection_leaves_empty_are_no_fault_of_the_kernel(tmp_path: Path):
    assert problems_of(tmp_path, run_warps=1, roles=["producer"]) == []


def test_warps_beyond_those_told_of_are_an_error(tmp_path: Path):
    with capture(tmp_path) as session:
        launched = session.launch("demo", grid=2, warps=2, events=json.dumps(EVENT_TABLE))
        run_kernel(launched.descriptor, 2, 2, 1)
        headers = int(memory(launched.descriptor, fmt.LAUNCH_DESCRIPTOR)[0]["headers"])
        memory(headers, fmt.TRACK_HEADER)["warps_run"] = 5  # as csrc/trace/recorder.h does; test_recorder.py
    (problem,) = load(tmp_path).problems
    assert (problem.severity, problem.kind) == ("error", "surplus_warps")
    assert "ran with 5 warps a block" in problem.text
    assert "pass warps=5" in problem.text
    (trust,) = [line.text for line in headlines(analyze(load(tmp_path))) if line.word == "trust"]
    assert trust == f"{problem.text}; one clock; made on the CPU backend: order and coverage, never GPU durations"
    assert phase_statistics(load(tmp_path, unaligned=True)).losses == (problem.text,)
    with pytest.raises(BadInput, match="pass warps=5"):
        load(tmp_path, strict=True)


@pytest.mark.parametrize("blocks", [None, slice(1, 2)])
def test_blocks_beyond_those_told_of_are_an_error(tmp_path: Path, blocks: slice | None):
    with capture(tmp_path, blocks=blocks) as session:
        launched = session.launch("demo", grid=2, warps=2, events=json.dumps(EVENT_TABLE))
        run_kernel(launched.descriptor, 2, 2, 1)
        descriptor = memory(launched.descriptor, fmt.LAUNCH_DESCRIPTOR)[0]
        assert descriptor["num_blocks"] == 2
        memory(int(descriptor["headers"]), fmt.TRACK_HEADER)["block"] = 132  # as csrc/trace/recorder.h does
    (problem,) = load(tmp_path).problems
    assert (problem.severity, problem.kind) == ("error", "surplus_blocks")
    assert "ran with 132 blocks; those from block 2 on recorded nothing" in problem.text
    assert "pass grid=132" in problem.text
    with pytest.raises(BadInput, match="pass grid=132"):
        load(tmp_path, strict=True)


def test_a_launch_without_tracks_has_nowhere_to_tell_of_blocks(tmp_path: Path):
    with capture(tmp_path, blocks=slice(10, 20)) as session:
        launched = session.launch("demo", grid=4, warps=1, events=json.dumps(EVENT_TABLE))
        assert memory(launched.descriptor, fmt.LAUNCH_DESCRIPTOR)[0]["num_blocks"] == 0


@pytest.mark.parametrize("records_per_track", [2, 64])
def test_a_flight_recorder_whose_body_is_no_ring_says_so(tmp_path: Path, records_per_track: int):
    """Whether records were lost or not: what stays of a hang would be its begin."""
    told = problems_of(tmp_path, body=~1, keep="last", records_per_track=records_per_track)
    ((severity, _, count, text),) = [problem for problem in told if problem[1] == "keeps_first"]
    assert (severity, count) == ("error", 3)
    assert text.startswith("rank 0: 3 launches of demo kept the first records")
    assert text.endswith("launch the body that with_recorder(launch.descriptor, ...) picks")


def test_a_capture_whose_body_is_a_ring_says_so(tmp_path: Path):
    with capture(tmp_path, records_per_track=4) as session:
        launched = session.launch("demo", grid=1, warps=1, events=json.dumps(EVENT_TABLE))
        run_kernel(launched.descriptor, 1, 1, 1)
        headers = int(memory(launched.descriptor, fmt.LAUNCH_DESCRIPTOR)[0]["headers"])
        header = memory(headers, fmt.TRACK_HEADER)
        header["started"] = fmt.STARTED_RING
        header["attempted"] = 6  # as csrc/trace/recorder.h does; two are overwritten
    texts = {problem.kind: problem.text for problem in load(tmp_path).problems}
    assert texts["keeps_last"].endswith("launch the body that with_recorder(launch.descriptor, ...) picks")
    assert "keep='last'" not in " ".join(texts.values())


@pytest.mark.parametrize("selection", [{}, {"sink": "host", "records_per_track": 8}])
def test_a_second_launch_with_a_descriptor_is_told(tmp_path: Path, selection: dict, capsys: pytest.CaptureFixture[str]):
    with capture(tmp_path, **selection) as session:
        launched = session.launch("demo", grid=4, warps=2, events=json.dumps(EVENT_TABLE))
        run_kernel(launched.descriptor, 4, 2, 3)
        run_kernel(launched.descriptor, 4, 1, 2)
    (problem,) = load(tmp_path).problems
    assert (problem.severity, problem.kind) == ("error", "shared_tracks")
    assert "had several writers of 4 tracks" in problem.text
    with pytest.raises(BadInput, match="several writers"):
        load(tmp_path, strict=True)
    summary = summarize(load(tmp_path))
    assert (summary.ranks[0].records_lost, summary.ranks[0].has_lost_more) == (0, True)
    print_summary(summary)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[lines.index(next(line for line in lines if "lost" in line)) + 1][5] == "some"


def test_a_region_used_again_has_records_of_its_launch_before(tmp_path: Path):
    with capture(tmp_path, keep="last", records_per_track=8, max_bytes=1 << 13) as session:
        for spans in [3] * 40 + [1] * 40:
            launched = session.launch("demo", grid=1, warps=1, events=json.dumps(EVENT_TABLE))
            run_kernel(launched.descriptor, 1, 1, spans)
    assert "shared_tracks" not in {problem.kind for problem in load(tmp_path).problems}


def tell_of_surplus(descriptor: int, blocks: int, warps: int) -> None:
    """That so many ran, as csrc/trace/track.h does; 0: as the host was told. See test_recorder.py."""
    launch = descriptor_of(descriptor)
    header = memory(int(launch["headers"]), fmt.TRACK_HEADER)[0]
    if blocks:
        header["block"], header["launch_idx"] = blocks, launch["generation"]
    if warps:
        header["warps_run"] = int(launch["generation"]) << 16 | warps


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(("kind", "blocks", "warps"), [("surplus_blocks", 132, 0), ("surplus_warps", 0, 5)])
def test_a_region_used_again_says_how_its_last_launch_ran(tmp_path: Path, kind: str, blocks, warps, is_last: bool):
    ran_larger = [True] * 40 + [False] * 40
    with capture(tmp_path, keep="last", records_per_track=8, max_bytes=1 << 13) as session:
        for surplus in reversed(ran_larger) if is_last else ran_larger:
            launched = session.launch("demo", grid=1, warps=1, events=json.dumps(EVENT_TABLE))
            run_kernel(launched.descriptor, 1, 1, 1)
            if surplus:
                tell_of_surplus(launched.descriptor, blocks, warps)
    assert (kind in {problem.kind for problem in load(tmp_path).problems}) == is_last


def test_an_event_that_the_table_does_not_have_is_told(tmp_path: Path):
    short = EVENT_TABLE | {"events": EVENT_TABLE["events"][:1]}
    with capture(tmp_path) as session:
        for name, table, spans in (("silent", short, 0), ("demo", short, 3), ("right", EVENT_TABLE, 3)):
            launched = session.launch(name, grid=1, warps=1, events=json.dumps(table))
            run_kernel(launched.descriptor, 1, 1, spans)
    (problem,) = load(tmp_path).problems
    assert (problem.severity, problem.kind) == ("error", "unknown_event")
    assert problem.text.startswith("rank 0: demo recorded event 1, its table has 1, from 0 on: pass what")


def test_a_role_without_a_name_is_told(tmp_path: Path):
    with capture(tmp_path) as session:
        for name, roles in (("named", ["sender", "receiver"]), ("nameless", [])):
            launched = session.launch(name, grid=1, warps=3, events=json.dumps(EVENT_TABLE), roles=roles)
            for warp in range(3):
                TrackWriter(launched.descriptor, 0, warp, role=warp).finish()
    (problem,) = load(tmp_path).problems
    assert (problem.severity, problem.kind) == ("warning", "unknown_role")
    assert problem.text == "rank 0: named has tracks of role 2, for which roles= of capture.launch() has no name"


def test_a_capture_without_launches_says_so(tmp_path: Path, command_line):
    with capture(tmp_path):
        pass
    assert "no launch is on record" in command_line("info", tmp_path).stdout
