"""`tracekern snapshot`: what a rank has recorded so far, copied while it records on, by another process."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from test_keeper import PLAN, Pair, wait_to_be_killed
from warm_command import warm_commands

from tests.captures import EVENT_TABLE, CaptureSpec, make_segment, metadata, removed_after
from tests.kernels import run_kernel
from tests.paths import ROOT
from tracekern.cli.output import suggest
from tracekern.dump import format as fmt
from tracekern.dump.reader import Dump, read_dump
from tracekern.errors import BadInput
from tracekern.record.session import capture
from tracekern.segment.keeper import ask_keeper, collect_mirrored
from tracekern.segment.names import SHM_DIR, list_segments, remove_segment
from tracekern.segment.pack import write_dump
from tracekern.segment.snapshot import copy_as_it_stands, snapshot_run
from tracekern.segment.view import SegmentView
from tracekern.segment.writer import SegmentWriter
from tracekern.timeline.load import load
from tracekern.timeline.model import TrackKind

START = """
import json, sys
sys.path.insert(0, {root!r})
from tests.captures import EVENT_TABLE
from tests.kernels import TrackWriter, run_kernel
from tracekern.record.session import capture
how = {how!r}
with capture({directory!r}, **how) as session:
    def launch(epoch=0):
        return session.launch("demo", grid=2, warps=2, events=json.dumps(EVENT_TABLE), epoch=epoch).descriptor
"""
ONE_LAUNCH = """
    run_kernel(launch(), 2, 2, 3)
    print(session.run_id, flush=True)
    sys.stdin.readline()
    run_kernel(launch(), 2, 2, 3)
"""
LAUNCHES_WITHOUT_END = """
    for epoch in range(1 << 30):
        descriptor = launch(epoch)
        for track in range(4) if descriptor else ():
            writer = TrackWriter(descriptor, track // 2, track % 2)
            for _ in range(3):
                writer.span(1, epoch)
            writer.finish()
        if epoch == 1000:
            print(session.run_id, flush=True)
"""
Start = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a rank that captures into `capture`; returns it, when it has printed its run, and the run."""
    started = []

    def start_one(program: str, **how: object) -> tuple[subprocess.Popen[str], str]:
        text = START.format(root=str(ROOT), directory=str(tmp_path / "capture"), how=how) + program
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", text], **pipes)
        started.append((process, process.stdout.readline().strip()))
        return started[-1]

    yield start_one
    for process, run_id in started:
        process.kill()
        process.wait()
        for name in list_segments(run_id):
            remove_segment(name)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm_commands().run("snapshot", *arguments)


def dump_in(directory: Path) -> Dump:
    return read_dump(directory / "rank_00000.tkdump")


def test_a_rank_is_copied_and_runs_on(start, tmp_path):
    process, run_id = start(ONE_LAUNCH, max_bytes=1 << 20)
    place = tmp_path / "now"
    told = json.loads(command(run_id, "-o", str(place), "--json").stdout)
    assert told == {"run_id": run_id, "ranks": [0], "capture": str(place)}
    timeline = load(place)
    assert [rank.state for rank in timeline.ranks] == ["running"]
    assert [(problem.severity, problem.kind) for problem in timeline.problems] == [("note", "running")]
    assert len(timeline.launches) == 1
    assert "snapshot" in timeline.host_names

    process.communicate("\n", timeout=60)
    assert process.returncode == 0
    assert [rank.state for rank in load(tmp_path / "capture").ranks] == ["closed"]
    assert len(dump_in(tmp_path / "capture").launches) == 2
    over = command(run_id, "-o", str(place))
    assert over.returncode == 2
    assert over.stderr.startswith(
        f"tracekern: run {run_id}: no capture is open on this machine; snapshot reads programs"
    )


def test_a_second_one_takes_the_place_of_the_first(start, tmp_path):
    _, run_id = start(ONE_LAUNCH, max_bytes=1 << 20)
    first = command(run_id, "-o", str(tmp_path / "now"))
    assert first.stdout == f"run {run_id}: what rank 0 of 1 recorded so far -> {tmp_path / 'now'}\n"
    assert first.stderr.endswith(f"report {tmp_path / 'now'}\n")
    assert command(run_id, "-o", str(tmp_path / "now")).returncode == 0
    assert load(tmp_path / "now").ranks[0].state == "running"


def test_it_takes_the_place_of_nothing_else(start, tmp_path):
    _, run_id = start(ONE_LAUNCH, max_bytes=1 << 20)
    with capture(tmp_path / "other", device="cpu", max_bytes=1 << 20) as other:
        pass
    for place, why in (
        (tmp_path / "capture", "the run itself writes its capture there"),
        (tmp_path / "other", f"holds run {other.run_id}"),
    ):
        refused = command(run_id, "-o", str(place))
        assert (refused.returncode, refused.stdout) == (2, "")
        assert why in refused.stderr
    assert not list((tmp_path / "capture").glob("*.tkdump"))


def test_of_a_dead_rank_it_has_what_was_left_and_leaves_it(start, tmp_path):
    process, run_id = start(ONE_LAUNCH, max_bytes=1 << 20)
    process.send_signal(signal.SIGKILL)
    process.wait()
    refused = command(run_id, "-o", str(tmp_path / "now"))
    assert refused.returncode == 2
    left = f"dead ranks of run {run_id}, into {tmp_path / 'capture'}, left records: `{suggest('salvage', run_id)}`"
    assert "python -m" not in left, "it would import from the working directory"
    assert refused.stderr.startswith(f"tracekern: run {run_id}: no capture is open on this machine; {left} saves them")
    about = metadata(CaptureSpec(run_id=run_id), 1) | {"directory": str(tmp_path / "capture")}
    other = SegmentWriter.create(run_id, 1, about, 1 << 16)
    try:
        assert json.loads(command(run_id, "-o", str(tmp_path / "now"), "--json").stdout)["ranks"] == [0, 1]
    finally:
        other.close()
    assert dump_in(tmp_path / "now").metadata["state"] == "salvaged"
    assert len(list_segments(run_id)) == 2


def test_several_open_captures_are_told_apart_by_name(start, tmp_path):
    _, run_id = start(ONE_LAUNCH, max_bytes=1 << 20)
    about = metadata(CaptureSpec(run_id=f"{run_id}.1"), 0) | {"directory": str(tmp_path / "second")}
    second = SegmentWriter.create(f"{run_id}.1", 0, about, 1 << 16)
    try:
        assert json.loads(command(run_id, "-o", str(tmp_path / "a"), "--json").stdout)["run_id"] == run_id
        assert json.loads(command(f"{run_id}.1", "-o", str(tmp_path / "b"), "--json").stdout)["run_id"] == f"{run_id}.1"
        assert command(f"{run_id}.1", "-o", str(tmp_path / "b")).stderr.endswith(f"report {tmp_path / 'b'} --partial\n")
    finally:
        second.close()


def test_a_damaged_segment_beside_it_is_left_out(start, tmp_path):
    _, run_id = start(ONE_LAUNCH, max_bytes=1 << 20)
    (SHM_DIR / f"tracekern-{run_id}-1").write_bytes(b"born a moment ago")
    assert snapshot_run(run_id, tmp_path / "now") == [0]


def test_launches_are_whole_whatever_the_rank_does_meanwhile(start, tmp_path, monkeypatch):
    """A flight recorder with few regions gives each to a later launch all the time, and the copy takes its time."""
    copy_from = SegmentWriter.copy_from

    def copy_slowly(self: SegmentWriter, other: SegmentWriter, offset: int, num_bytes: int) -> None:
        for part in range(4):
            first, stop = num_bytes * part // 4, num_bytes * (part + 1) // 4
            copy_from(self, other, offset + first, stop - first)
            if random.random() < 0.03:  # seldom: else the rank always gives the region away in time
                time.sleep(0.0002)

    monkeypatch.setattr(SegmentWriter, "copy_from", copy_slowly)
    process, run_id = start(LAUNCHES_WITHOUT_END, max_bytes=1 << 14, keep="last", records_per_track=8, clocks=False)
    num_launches = num_snapshots = 0
    while num_launches <= 100 and num_snapshots < 500:  # how many are through depends on what else runs here
        num_snapshots += 1
        snapshot_run(run_id, tmp_path / "now")
        timeline, dump = load(tmp_path / "now"), dump_in(tmp_path / "now")
        headers = {launch.launch_idx: dump.track_headers(launch) for launch in dump.launches}
        assert all((found["written"][found["finished"] != 0] == 6).all() for found in headers.values())
        # Of one that is under way the newest record may be half there: Python stores no 16 bytes at once.
        is_through = np.array([headers[launch.launch_idx]["finished"].all() for launch in timeline.launches], bool)
        epochs = np.array([launch.epoch for launch in timeline.launches], np.uint64)
        spans = timeline.spans.take(timeline.tracks_of(TrackKind.DEVICE)[timeline.spans.track])
        spans = spans.take(is_through[spans.launch])
        assert len(spans) == 4 * 3 * is_through.sum()
        assert (spans.begin_payload == epochs[spans.launch]).all()
        num_launches += int(is_through.sum())
    assert process.poll() is None
    assert num_launches > 100


def test_a_region_given_to_a_later_launch_again_and_again_is_left_out(tmp_path, monkeypatch):
    with capture(tmp_path / "capture", device="cpu", max_bytes=1 << 20, clocks=False) as session:
        for _ in range(2):
            run_kernel(session.launch("demo", grid=1, warps=1, events=json.dumps(EVENT_TABLE)).descriptor, 1, 1, 3)
        copy_from, order = SegmentWriter.copy_from, session.segment.launches()["order"]

        def copy_while_it_is_used(self: SegmentWriter, other: SegmentWriter, offset: int, num_bytes: int) -> None:
            copy_from(self, other, offset, num_bytes)
            order[1] += 1

        monkeypatch.setattr(SegmentWriter, "copy_from", copy_while_it_is_used)
        copy = copy_as_it_stands(SegmentView.attach(session.segment.name))
        assert [int(entry["sequence"]) for entry in copy.recorded_launches()] == [0]


def test_a_keeper_copies_for_whoever_asks_and_again_at_the_end(tmp_path):
    pair = Pair(tmp_path, wait_to_be_killed)
    try:
        for _ in range(2):
            assert ask_keeper(pair.name)
        write_dump(tmp_path / "now.tkdump", copy_as_it_stands(SegmentView.attach(pair.name)))
        dump = read_dump(tmp_path / "now.tkdump")
        assert dump.track_headers(dump.launches[0])["role"].tolist() == [3, 3]
        SegmentWriter.attach(pair.name).track_headers(pair.entry())["role"] = 0
        os.kill(pair.rank, signal.SIGKILL)
        os.waitpid(pair.rank, 0)
        assert pair.roles() == [3, 3]
    finally:
        pair.end()


def test_without_a_keeper_what_the_device_holds_is_missing_and_told(tmp_path):
    with removed_after(make_segment("snapshot", 1 << 16)) as segment:
        (region,) = segment.reserve_regions(PLAN, 1)
        segment.start_launch(region, sequence=0, epoch=0)
        segment.header["state"] = fmt.SegmentState.RUNNING
        write_dump(tmp_path / "rank_00000.tkdump", segment)
        assert not ask_keeper(segment.name)
    assert [
        problem.text
        for problem in load(tmp_path / "rank_00000.tkdump", partial=True).problems
        if problem.kind == "launch_lost"
    ] == ["rank 0: 1 launch recorded in device memory, to come when the capture closes; take keep='last'"]


def test_half_a_launch_is_none():
    """The region went to the next launch while the keeper copied it."""
    with removed_after(make_segment("half", 1 << 16)) as segment:
        for region in segment.reserve_regions(PLAN, 2):
            segment.start_launch(region, sequence=0, epoch=0)
        arena, launches = int(segment.header["arena_offset"]), segment.launches()

        def copy(offset: int, num_bytes: int) -> None:
            segment._bytes[arena + offset : arena + offset + num_bytes] = 1
            if arena + offset == int(launches["headers_offset"][1]):
                launches["order"][1] += 1

        assert collect_mirrored(segment, copy) == 2
        started = [segment.track_headers(entry)["started"].any() for entry in launches]
        assert started == [True, False]


def test_a_directory_that_is_a_file_is_refused(start, tmp_path):
    _, run_id = start(ONE_LAUNCH, max_bytes=1 << 20)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"cannot be written \(it is a file\)"):
        snapshot_run(run_id, tmp_path / "file")
