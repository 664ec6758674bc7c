"""What a compiler made is kept until a source, a header, a flag or the compiler is another."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import kept_builds
import pytest
from toolchains import require

SOURCE = "#include <answer.h>\nint main() { return kAnswer; }\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source, its header, and a cache with nothing in it."""
    require("g++")
    monkeypatch.setattr(kept_builds, "CACHE", tmp_path / "cache")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "answer.h").write_text("constexpr int kAnswer = 3;\n")
    (tmp_path / "main.cpp").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def made(tree: Path) -> Callable[..., Path]:
    """Compiles main.cpp of the tree, or of a copy of it."""

    def make(*flags: str, at: Path = tree) -> Path:
        done = kept_builds.build(("g++", *flags, f"-I{at / 'include'}"), [at / "main.cpp"])
        assert done.returncode == 0, done.stderr
        return done.result

    return make


def test_nothing_is_compiled_again_until_something_is_another(tree, made):
    first = made()
    when = first.stat().st_ino
    assert subprocess.run([first]).returncode == 3
    copy = tree / "copy"
    (copy / "include").mkdir(parents=True)
    for name in ("main.cpp", "include/answer.h"):
        (copy / name).write_bytes((tree / name).read_bytes())
    assert made(at=copy) == made() == first
    assert first.stat().st_ino == when
    assert made("-O1") != first
    (tree / "include" / "answer.h").write_text("constexpr int kAnswer = 4;\n")
    assert subprocess.run([made()]).returncode == 4


def test_what_is_refused_is_said_each_time_and_not_kept(tree):
    (tree / "main.cpp").write_text("int main() { return nothing; }\n")
    for _ in range(2):
        done = kept_builds.build(("g++",), [tree / "main.cpp"])
        assert done.returncode == 1
        assert "nothing" in done.stderr
    assert [path.suffix for path in (tree / "cache").iterdir()] == [".lock"]


def test_programs_that_call_a_compiler_get_what_was_kept(tree):
    """The one on PATH, as examples call it: with the output anywhere, and messages as if it had run."""
    (tree / "main.cpp").write_text(SOURCE.replace("return", "int unused; return"))
    command = ["g++", "-Wall", "-I", str(tree / "include"), "main.cpp", "-o"]
    said = []
    for name in ("first", "second"):
        done = subprocess.run([*command, name], cwd=tree, capture_output=True, text=True)
        said.append(done.stderr)
        assert subprocess.run([tree / name]).returncode == 3
    assert "unused" in said[0]
    assert said[0] == said[1]
    done = subprocess.run(["g++", "-E", *command[2:5]], cwd=tree, capture_output=True, text=True)
    assert "kAnswer = 3" in done.stdout  # not kept, as there is no file: the compiler itself ran


def test_what_no_test_asked_for_in_a_while_goes(tree, made):
    old, used = made("-O0"), made("-O1")
    long_ago = time.time() - 2 * kept_builds.KEPT_S
    for path in (tree / "cache").iterdir():
        os.utime(path, (long_ago, long_ago))
    made("-O1")
    kept_builds.remove_old()
    assert used.exists()
    assert not old.exists()
