"""Files that appear whole or not at all, beside other users who can write to the directory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tracekern import files
from tracekern.errors import BadInput
from tracekern.files import atomic_file, pinned, write_whole


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.endswith(".tmp"))


def test_a_temporary_file_has_a_name_of_its_own_each_time(tmp_path: Path):
    seen = set()
    for _ in range(3):
        with atomic_file(tmp_path / "out") as file:
            file.write(b"text")
            seen.update(leftovers(tmp_path))
    assert len(seen) == 3
    assert all(f"-{os.getpid()}-" in name for name in seen)
    assert leftovers(tmp_path) == []


def test_a_planted_temporary_file_is_not_opened(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "0" * 8)  # even if somebody could foresee the name
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".out.{files.host_of_processes()}-{os.getpid()}-{'0' * 8}.tmp").symlink_to(victim)
    with pytest.raises(BadInput, match="cannot write .*out: File exists"):
        write_whole(tmp_path / "out", "text")
    assert victim.read_text() == "precious"


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    (tmp_path / "out").write_text("old")

    def fail() -> None:
        with atomic_file(tmp_path / "out") as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "old"


def test_what_dead_processes_left_is_removed_and_nothing_else(tmp_path: Path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {
        "dead": f".out.{files.host_of_processes()}-{dead.pid}-00000000.tmp",
        "alive": f".out.{files.host_of_processes()}-{os.getppid()}-00000000.tmp",
        "another host": f".out.ffffffff-{dead.pid}-00000000.tmp",
        "another program": f".out.{dead.pid}.tmp",
    }
    for name in names.values():
        (tmp_path / name).write_text("")
    write_whole(tmp_path / "report.html", "text")
    assert leftovers(tmp_path) == sorted(set(names.values()) - {names["dead"]})


def test_a_long_name_can_be_written(tmp_path: Path):
    write_whole(tmp_path / ("ä" * 127), "text")
    assert (tmp_path / ("ä" * 127)).read_text() == "text"


def test_a_link_is_replaced_where_the_user_did_not_name_it(tmp_path: Path):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    with atomic_file(link, through_link=False) as file:
        file.write(b"text")
    assert not link.is_symlink()
    assert (link.read_text(), victim.read_text()) == ("text", "precious")


def test_a_pinned_directory_stays_itself_when_another_takes_its_name(tmp_path: Path):
    with pinned(tmp_path / "new" / "capture") as place:
        (tmp_path / "new").rename(tmp_path / "moved")
        (tmp_path / "new").symlink_to(tmp_path)
        write_whole(place / "file", "text")
    assert (tmp_path / "moved" / "capture" / "file").read_text() == "text"


def test_errors_in_a_pinned_directory_name_the_directory(tmp_path: Path):
    with pytest.raises(BadInput) as caught, pinned(tmp_path) as place:
        write_whole(place / "missing" / "file", "text")
    assert f"cannot write {tmp_path}/missing/file: No such file" in str(caught.value)


def test_a_scratch_directory_is_private_and_goes_with_those_of_dead_processes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    ours = f"tracekern-{files.host_of_processes()}"
    for name in (f"{ours}-{dead.pid}-a", f"{ours}-{os.getppid()}-b", "tracekern-c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    with files.scratch_directory() as scratch:
        assert scratch.stat().st_mode & 0o777 == 0o700
        assert len(list(tmp_path.iterdir())) == 3
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([f"{ours}-{os.getppid()}-b", "tracekern-c"])


def test_no_place_for_temporary_files_is_one_line(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(BadInput, match="temporary directory: No such file or directory; set TMPDIR to"):
        files.scratch_directory().__enter__()
