"""What ranks leave in shared memory that crash and start again: saved at the next start, and else capped."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.captures import CaptureSpec, metadata
from tests.paths import ROOT
from tests.sessions import launch
from tracekern.dump.reader import run_in
from tracekern.record.session import capture
from tracekern.segment import evidence
from tracekern.segment.evidence import keeping, make_way
from tracekern.segment.names import list_segments, remove_segment
from tracekern.segment.writer import SegmentWriter
from tracekern.timeline.load import load

CRASHES = """
import os, signal, sys
from tests.sessions import launch
from tracekern.record.session import capture
with capture(sys.argv[1], device="cpu", max_bytes=1 << 20) as session:
    launch(session)
    print(session.run_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def crash(directory: Path) -> tuple[str, str]:
    """Returns the run's name and what its start logged."""
    ended = subprocess.run(
        [sys.executable, "-c", CRASHES, str(directory)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return ended.stdout.strip(), ended.stderr


def test_each_start_saves_what_the_one_before_left(tmp_path: Path):
    runs = []
    for number in range(3):
        run, told = crash(tmp_path)
        assert list_segments(run), "no start has saved it yet"
        if runs:
            place = tmp_path / f"attempt-{number - 1}" if number > 1 else tmp_path
            assert f"what rank 0 of run {runs[-1]} left in shared memory is saved in {place}" in told
            assert run_in(place / "rank_00000.tkdump") == runs[-1]
            assert not list_segments(runs[-1])
        runs.append(run)
    with capture(tmp_path, device="cpu", max_bytes=1 << 20) as session:
        launch(session)
    assert session.directory == tmp_path / "attempt-3"
    assert [rank.state for rank in load(tmp_path).ranks] == ["salvaged"], "the first crash is still there"
    assert not list_segments(runs[-1])


def test_what_another_process_saves_is_left_to_it(tmp_path: Path):
    run, _ = crash(tmp_path)
    with keeping(run):
        make_way(tmp_path, "")
        assert list_segments(run)
    killed = Path(f"/dev/shm/tracekern-{run}.kept")
    killed.touch()  # of a launcher that was killed, and holds no lock
    with keeping(f"{run}-next"):
        assert not killed.exists()
    make_way(tmp_path / "elsewhere", "another command")
    assert list_segments(run), "it belongs to another capture"
    make_way(tmp_path, "")
    assert not list_segments(run)


@pytest.fixture
def dead_runs(tmp_path: Path) -> Iterator[list[str]]:
    """Ten runs of one command, each with 1 MB, that cannot be saved: a file is where their directories would be."""
    (tmp_path / "file").write_text("")
    names = []
    for number in range(10):
        run_id = f"dead-{number}-{uuid.uuid4().hex}"
        about = metadata(CaptureSpec(run_id=run_id), 0) | {
            "directory": str(tmp_path / "file" / str(number)),
            "command": str(tmp_path),
        }
        segment = SegmentWriter.create(run_id, 0, about, 1 << 20)
        segment.back_arena()
        segment.close()
        os.utime(f"/dev/shm/{segment.name}", (number, number))
        names.append(segment.name)
    yield names
    for name in names:
        remove_segment(name)


def left(names: list[str]) -> list[int]:
    return [number for number, name in enumerate(names) if os.path.exists(f"/dev/shm/{name}")]


def test_the_first_crash_and_the_newest_ones_stay(
    dead_runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    make_way(tmp_path / "next", str(tmp_path))
    assert left(dead_runs) == [0, *range(3, 10)]
    told = [record.getMessage() for record in caplog.records if "is removed" in record.getMessage()]
    assert len(told) == 2
    assert told[0].startswith("what rank 0 of run dead-1-")
    assert told[0].endswith("is removed: dead runs may take a quarter of /dev/shm, and be 8")
    caplog.set_level(logging.CRITICAL)
    shm = os.statvfs("/dev/shm")
    monkeypatch.setattr(evidence, "SHARE", shm.f_blocks * shm.f_frsize // (4 << 20))
    make_way(tmp_path / "next", str(tmp_path))
    assert left(dead_runs) == [0, 8, 9], "4 MB, each takes more than 1"
    monkeypatch.setattr(evidence, "SHARE", shm.f_blocks * shm.f_frsize)
    make_way(tmp_path / "next", str(tmp_path))
    assert left(dead_runs) == [9]
