"""What other users leave in /dev/shm, and in directories that they can write to: none of it is trusted."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.captures import CaptureSpec, fill_segment
from tests.conftest import CommandLine
from tracekern.cli.commands.open_trace import _trace_of
from tracekern.cli.commands.run_moe import _write_trace
from tracekern.dump.format import TRACE_NAME
from tracekern.dump.reader import run_in
from tracekern.errors import BadInput
from tracekern.segment.manifest import forget_old_capture
from tracekern.segment.names import SHM_DIR, list_segments, open_segment, remove_segment
from tracekern.segment.salvage import find_leftovers, salvage_run
from tracekern.segment.view import SegmentView

NOBODY = 65534
DUMP = "rank_00000.tkdump"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"strange-{uuid.uuid4().hex[:8]}"
    yield name
    for segment in list_segments(name, of_anybody=True):
        remove_segment(segment)


def leave_segment(run_id: str, directory: Path) -> Path:
    """A segment of a rank that is gone, whose capture goes to `directory`."""
    spec = CaptureSpec(num_ranks=1, run_id=run_id, directory=str(directory), killed_rank=0)
    segment = fill_segment(spec, 0)
    segment.close()
    return (SHM_DIR / segment.name).rename(SHM_DIR / f"tracekern-{run_id}-0")


@as_root
def test_a_segment_of_another_user_is_neither_read_nor_saved_nor_removed(run_id: str, tmp_path: Path):
    path = leave_segment(run_id, tmp_path / "capture")
    os.chown(path, NOBODY, NOBODY)
    assert (list_segments(run_id), find_leftovers(run_id), salvage_run(run_id)) == ([], [], set())
    with pytest.raises(BadInput, match=r"cannot be opened \(not only user 0 can write it\)"):
        SegmentView.attach(path.name)
    assert path.exists()
    assert not (tmp_path / "capture").exists()


def test_a_segment_that_others_can_write_is_refused(run_id: str, tmp_path: Path):
    path = leave_segment(run_id, tmp_path / "capture")
    path.chmod(0o622)
    with pytest.raises(PermissionError, match=f"not only user {os.geteuid()} can write it"):
        open_segment(path.name)


@pytest.mark.parametrize("what", ["link", "pipe", "directory"])
def test_what_is_no_file_is_no_segment(run_id: str, tmp_path: Path, what: str):
    real = leave_segment(run_id, tmp_path)
    path = SHM_DIR / f"tracekern-{run_id}-1"
    {"link": lambda: path.symlink_to(real), "pipe": lambda: os.mkfifo(path), "directory": path.mkdir}[what]()
    try:
        assert list_segments(run_id) == [real.name]
        with pytest.raises(BadInput, match="cannot be opened"):
            SegmentView.attach(path.name)
    finally:
        path.rmdir() if what == "directory" else path.unlink()


def test_a_planted_link_in_the_capture_directory_is_not_written_through(run_id: str, tmp_path: Path):
    capture, victim = tmp_path / "capture", tmp_path / "victim"
    capture.mkdir()
    victim.write_text("precious")
    (capture / DUMP).symlink_to(victim)
    (capture / "capture.json").symlink_to(victim)
    leave_segment(run_id, capture)
    assert salvage_run(run_id) == {0}
    assert victim.read_text() == "precious"
    assert run_in(capture / DUMP) == run_id
    assert not (capture / DUMP).is_symlink()
    assert not (capture / "capture.json").is_symlink()


@pytest.mark.parametrize("where", ["capture", "capture/below"])
def test_a_link_on_the_way_to_the_capture_directory_is_refused(run_id: str, tmp_path: Path, where: str, caplog):
    (tmp_path / "victim").mkdir()
    segment = leave_segment(run_id, tmp_path / where)
    (tmp_path / "capture").symlink_to(tmp_path / "victim")
    assert salvage_run(run_id) == set()
    assert f"{tmp_path / where}: nothing is written there (a link is in its place or on the way to it" in caplog.text
    assert list((tmp_path / "victim").iterdir()) == []
    assert segment.exists()

    assert salvage_run(run_id, tmp_path / "elsewhere") == {0}  # the user's own word, which may be a link
    assert run_in(tmp_path / "elsewhere" / DUMP) == run_id


@pytest.mark.parametrize("planted", ["file", "missing", "directory"])
@pytest.mark.parametrize("command", ["run", "open"])
def test_a_planted_link_is_replaced_by_the_trace(run_id: str, tmp_path: Path, command: str, planted: str):
    capture, victim = tmp_path / "capture", tmp_path / "victim"
    leave_segment(run_id, capture)
    assert salvage_run(run_id) == {0}
    {"file": lambda: victim.write_text("precious"), "missing": lambda: None, "directory": victim.mkdir}[planted]()
    if victim.exists():
        os.utime(victim, (0, 0))  # or `open` would take it for the capture's trace
    (capture / TRACE_NAME).symlink_to(victim)
    if command == "run":
        report = SimpleNamespace(ok=False, ranks=())
        assert _write_trace(report, capture, [capture / DUMP]).trace == capture / TRACE_NAME
    else:
        assert _trace_of(capture, lambda: tmp_path, everything=False) == capture / TRACE_NAME
    assert not (capture / TRACE_NAME).is_symlink()
    assert (capture / TRACE_NAME).read_bytes()[:2] == b"\x1f\x8b"
    assert planted != "file" or victim.read_text() == "precious"
    assert planted != "missing" or not victim.exists()


def test_a_link_that_the_user_typed_is_followed(run_id: str, tmp_path: Path, command_line: CommandLine):
    leave_segment(run_id, tmp_path / "capture")
    assert salvage_run(run_id) == {0}
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    done = command_line("export", tmp_path / "capture", "--partial", "--unaligned", "-o", tmp_path / "link.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "target.json").is_file()


@pytest.mark.parametrize("planted", ["file", "missing"])
def test_a_new_capture_removes_a_planted_link_of_the_traces_name(tmp_path: Path, planted: str):
    victim = tmp_path / "victim"
    if planted == "file":
        victim.write_text("precious")
    (tmp_path / TRACE_NAME).symlink_to(victim)
    forget_old_capture(tmp_path, 0, [0])
    assert not (tmp_path / TRACE_NAME).is_symlink()
    assert victim.exists() == (planted == "file")


def test_a_damaged_directory_name_stays_inside_the_message(run_id: str, tmp_path: Path, caplog):
    leave_segment(run_id, tmp_path / "a file" / "capture")
    (tmp_path / "a file").write_text("")
    assert salvage_run(run_id) == set()
    assert f"{tmp_path}/a file/capture: nothing is written there" in caplog.text
    assert "/proc/self" not in caplog.text
