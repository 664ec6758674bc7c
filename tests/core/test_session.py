"""Captures opened in this process, and in real ranks of torch.distributed."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import numpy as np
import pytest

from tests.captures import EVENT_TABLE
from tests.kernels import TrackWriter
from tests.paths import ROOT
from tests.sessions import TABLE, launch
from tracekern.comm.ranks.group import Group
from tracekern.dump import format as fmt
from tracekern.dump.reader import peek_metadata, read_dump
from tracekern.errors import BadInput
from tracekern.record.selection import DEFAULT_RECORDS_PER_TRACK
from tracekern.record.session import Capture, capture
from tracekern.segment.directory_lock import LOCK_NAME
from tracekern.segment.names import SHM_DIR
from tracekern.timeline.load import load
from tracekern.timeline.model import TrackKind


def test_numbers_that_json_lacks_are_kept_as_text(tmp_path):
    """NaN differs from itself: no two runs with such a setting could be compared. Nor does it end the job."""
    rates = {"warm": math.nan, "cold": [1.5, -math.inf, {"top": np.float64("inf")}], "n": (1, 2)}
    with capture(tmp_path, settings=rates):
        pass
    stored = peek_metadata(tmp_path / fmt.dump_file_name(0))["settings"]
    assert stored == {"warm": "nan", "cold": [1.5, "-inf", {"top": "inf"}], "n": [1, 2]}


def test_a_capture_of_one_rank_reads_back(tmp_path: Path):
    with capture(tmp_path, settings={"tokens": 64}, command="the command") as session:
        with session.range("step"):
            launch(session)
            launch(session)
        assert session.footprint_bytes > 0
        name = session.segment.name
    assert not (SHM_DIR / name).exists()

    timeline = load(tmp_path)
    kinds = np.array([track.kind for track in timeline.tracks])[timeline.spans.track]
    assert (kinds == TrackKind.DEVICE).sum() == 2 * 4 * 3
    assert timeline.host_names == ("step",)
    metadata = timeline.ranks[0].metadata
    assert (metadata["settings"], metadata["command"], metadata["state"]) == ({"tokens": 64}, "the command", "closed")
    host = np.flatnonzero(kinds == TrackKind.HOST)
    device = np.flatnonzero(kinds == TrackKind.DEVICE)
    # One axis: the kernels ran inside the host's range.
    assert timeline.spans.start[host[0]] <= timeline.spans.start[device].min()
    assert timeline.spans.end[device].max() <= timeline.spans.end[host[0]]
    manifest = json.loads((tmp_path / "capture.json").read_text())
    assert [entry["file"] for entry in manifest["ranks"]] == ["rank_00000.tkdump"]


def test_counting_gives_what_the_fullest_track_needs_and_a_quarter_more(tmp_path: Path):
    with capture(tmp_path) as session:
        with session.counting():
            launch(session, spans=5)
            launch(session, spans=9)
        launch(session, spans=12)
        launch(session, name="never counted")
    launches = read_dump(tmp_path / "rank_00000.tkdump").launches
    assert [entry.records_per_track for entry in launches] == [12, DEFAULT_RECORDS_PER_TRACK]
    assert [entry.sequence for entry in launches] == [0, 0]
    assert load(tmp_path, strict=True).problems == ()


def test_counting_goes_on_behind_a_block_of_its_own(tmp_path: Path):
    with capture(tmp_path) as session:
        with session.counting():
            with session.counting():
                launch(session, spans=5)
            launch(session, spans=9)
        launch(session, spans=9)
    assert [entry.records_per_track for entry in read_dump(tmp_path / "rank_00000.tkdump").launches] == [12]


def test_counting_a_kernel_that_still_runs_is_refused(tmp_path: Path):
    def count_without_waiting(session: Capture) -> None:
        with session.counting():
            launch(session)
            slow = session.launch("slow", grid=1, warps=2, events=TABLE).descriptor
            TrackWriter(slow, 0, 0).finish()
            TrackWriter(slow, 0, 1)

    with capture(tmp_path) as session, pytest.raises(BadInput, match="'slow' still runs"):
        count_without_waiting(session)


def test_every_nth_launch_of_a_name(tmp_path: Path):
    with capture(tmp_path, every=3) as session:
        traced = [launch(session).traced for _ in range(7)]
    assert traced == [True, False, False, True, False, False, True]
    assert [entry.sequence for entry in read_dump(tmp_path / "rank_00000.tkdump").launches] == [0, 3, 6]


def test_selected_blocks_and_events(tmp_path: Path):
    with capture(tmp_path, blocks=slice(1, 6, 2), events=["copy_token"]) as session:
        launch(session, grid=8)
    timeline = load(tmp_path)
    assert sorted({track.block for track in timeline.tracks if track.kind == TrackKind.DEVICE}) == [1, 3, 5]
    with capture(tmp_path, events=["wait_token"]) as session:
        launch(session)
    assert not [track for track in load(tmp_path).tracks if track.kind == TrackKind.DEVICE]


def test_a_misspelt_event_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "tracekern"), capture(tmp_path, events=["copy_tokn"]) as session:
        launch(session)
    assert "'copy_tokn'" in caplog.text


def test_a_launch_beyond_the_cap_runs_unrecorded_and_is_told(tmp_path: Path):
    with capture(tmp_path, max_bytes=1 << 20, records_per_track=1000) as session:
        traced = [launch(session, grid=8).traced for _ in range(6)]
    assert traced == [True] * 4 + [False] * 2  # 8 x 2 tracks of 16,000 bytes each time
    problems = load(tmp_path).problems
    assert [(p.kind, p.count) for p in problems] == [("launch_not_recorded", 2)]
    with pytest.raises(BadInput, match="max_bytes"):
        load(tmp_path, strict=True)


def test_a_launch_beyond_all_memory_is_one_more_that_runs_unrecorded(tmp_path: Path):
    with capture(tmp_path, records_per_track=(1 << 31) - 1) as session:
        for _ in range(3):
            assert not session.launch("huge", grid=(1 << 31) - 1, warps=(1 << 16) - 1, events=TABLE).traced
    assert read_dump(tmp_path / "rank_00000.tkdump").metadata["launches_refused"] == 3


def test_nested_captures_are_refused(tmp_path: Path):
    with (
        capture(tmp_path / "a"),
        pytest.raises(BadInput, match="close it first"),
        capture(tmp_path / "b"),
    ):
        pass
    with capture(tmp_path / "c"):
        pass


def test_an_exception_in_the_workload_keeps_the_dump(tmp_path: Path):
    def fail() -> None:
        with capture(tmp_path) as session:
            launch(session)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert len(load(tmp_path).spans) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"records_per_track": -1}, "records_per_track=-1"),
        ({"every": 0}, "every=0"),
        ({"clock": "cycles", "keep": "last"}, "clock='cycles' with keep='last'"),
        ({"sink": "disk"}, "sink='disk'"),
        ({"blocks": slice(-3, None)}, "start -3"),
        ({"blocks": 3}, "blocks=3"),
        ({"roles": "sender"}, "roles='sender'"),
        ({"events": 5}, "events=5"),
        ({"command": 5}, "command=5: wanted text"),
        ({"max_bytes": 0}, "max_bytes=0"),
        ({"max_bytes": 1 << 63}, r"max_bytes=9223372036854775808: wanted a whole number from 1 to 2\^48 - 1"),
        ({"host_spans": -1}, "host_spans=-1"),
        ({"settings": {"rate": np.float32(1)}}, "settings=.*float32"),
        ({"preload": print}, "preload=.*list of functions"),
    ],
)
def test_arguments_are_checked_before_anything_is_opened(tmp_path: Path, arguments: dict, message: str):
    with pytest.raises(BadInput, match=message):
        capture(tmp_path / "never", **arguments)
    assert not (tmp_path / "never").exists()


def one_event(**changed: object) -> dict:
    """A table as a kernel's author may have got it wrong."""
    return {**EVENT_TABLE, "events": [{**EVENT_TABLE["events"][1], **changed}]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": 3}, "launch 3"),
        ({"name": "é" * 48}, "at most 95 bytes"),
        ({"name": "a\udcff"}, "wanted a name"),
        ({"epoch": 1 << 32}, "epoch=4294967296"),
        ({"grid": 0}, "grid=0"),
        ({"warps": 1 << 16}, r"warps=65536; wanted a whole number from 1 to 2\^16 - 1"),
        ({"stream": 1 << 63}, "stream=9223372036854775808"),
        ({"grid": 2.5}, "grid=2.5"),
        ({"roles": "sender"}, "roles='sender'"),
        ({"roles": ["role"] * 33}, "launch 'demo': event table with 4 events and 33 roles: wanted at most 64 and 32"),
        ({"events": {}}, "launch 'demo': events="),
        (
            {"events": one_event(**{"class": "wrk"})},
            "launch 'demo': .*event 'copy_token': class 'wrk', wanted one of work",
        ),
        ({"events": json.dumps(one_event(begin_fields="x"))}, "launch 'demo': .*wanted name:bits"),
    ],
)
def test_arguments_of_a_launch_are_checked_and_spoil_no_capture(tmp_path: Path, arguments: dict, message: str):
    known = {"name": "demo", "grid": 2, "warps": 2, "events": TABLE} | arguments
    with capture(tmp_path) as session:
        launch(session)
        with pytest.raises(BadInput, match=message):
            session.launch(known.pop("name"), **known)
    assert [found.name for found in load(tmp_path).launches] == ["demo"]


def test_the_largest_arguments_of_a_launch_are_recorded_as_given(tmp_path: Path):
    grid, stream, epoch = (1 << 31) - 1, (1 << 63) - 1, (1 << 32) - 1
    with capture(tmp_path, blocks=slice(0, 1)) as session:
        assert session.launch("n" * 95, grid=grid, warps=2, events=TABLE, stream=stream, epoch=epoch).traced
    (found,) = read_dump(tmp_path / "rank_00000.tkdump").launches
    assert (found.name, found.num_blocks, found.stream, found.epoch) == ("n" * 95, grid, stream, epoch)


def test_a_capture_that_is_not_open_is_told(tmp_path: Path):
    session = capture(tmp_path)
    with pytest.raises(BadInput, match="outside the capture's `with` block"):
        launch(session)
    with session:
        launch(session)
    with pytest.raises(BadInput, match="outside the capture's `with` block"):
        launch(session)


def test_the_files_of_an_earlier_capture_of_more_ranks_go_with_it(tmp_path: Path):
    of_ranks = [f"rank_0000{rank}.{suffix}" for rank in (0, 1) for suffix in ("tkdump", "torch.json.gz")]
    for name in ("trace.pftrace.gz", "capture.json", *of_ranks, "mine.pftrace.gz"):
        (tmp_path / name).write_bytes(b"of an earlier capture")
    with capture(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {"mine.pftrace.gz", LOCK_NAME}
    assert [rank.rank for rank in load(tmp_path).ranks] == [0]


def test_a_capture_that_cannot_open_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = f"fails-{uuid.uuid4().hex}"
    monkeypatch.setenv("TRACEKERN_RUN_ID", run)
    with capture(tmp_path) as session:
        launch(session)
    for wrong in ({"max_bytes": 1 << 47}, {"preload": [lambda: 1 // 0]}):
        with pytest.raises((BadInput, ZeroDivisionError)), capture(tmp_path, **wrong):
            pass
    assert not list(SHM_DIR.glob(f"tracekern-{run}*"))
    assert len(load(tmp_path).launches) == 1


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for name in ("file/capture", "a" * 300, "zero\0byte"):
        with pytest.raises(BadInput, match="choose another directory"), capture(tmp_path / name):
            pass


@pytest.mark.parametrize("told", ["../../etc/x", ".hidden", "", "a\n", "x" * 300, None])
def test_a_run_id_of_a_peer_that_could_lead_elsewhere_is_refused(tmp_path: Path, monkeypatch, told: object):
    monkeypatch.setattr(Group, "all_gather", lambda self, value, what: [[told, *value[1:]]] if value else [value])
    with (
        pytest.raises(BadInput, match=r"^rank 0 names the run '.*'; wanted letters, digits"),
        capture(tmp_path / "new"),
    ):
        pass
    assert not (tmp_path / "new").exists()


def test_a_profile_of_torch_joins_the_capture(tmp_path: Path):
    program = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(ROOT)!r})
        import torch
        from torch.profiler import profile
        from tests.sessions import launch
        from tracekern.record.session import Capture, capture
        with capture({str(tmp_path)!r}) as session:
            with profile() as profiler:
                with session.range("around"):
                    torch.ones(64, 64) @ torch.ones(64, 64)
                    launch(session)
            session.add_torch_profile(profiler)
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    timeline = load(tmp_path)
    assert "aten::matmul" in timeline.host_names
    spans = timeline.spans
    host = [row for row in range(len(spans)) if timeline.tracks[spans.track[row]].kind == TrackKind.HOST]
    named = {timeline.host_names[int(spans.begin_payload[row])]: row for row in host}
    around, matmul = named["around"], named["aten::matmul"]
    # The profiler's clock is not ours: it may be microseconds off, not more than a millisecond.
    assert spans.start[around] - 10**6 <= spans.start[matmul]
    assert spans.end[matmul] <= spans.end[around] + 10**6


def test_what_is_to_be_loaded_is_loaded_when_the_capture_opens(tmp_path: Path):
    seen: list[str] = []
    session = capture(tmp_path, preload=[lambda: seen.append("loaded")])
    assert not seen
    with session:
        assert seen == ["loaded"]
        launch(session)
    assert seen == ["loaded"]
