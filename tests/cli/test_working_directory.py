"""Modules that another user planted in the working directory: none of our processes imports them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.paths import ROOT

TRACEKERN = Path(sys.executable).with_name("tracekern")
NAMES = {*sys.stdlib_module_names} - {*sys.builtin_module_names} | {
    *("tracekern", "torch", "numpy", "typer", "rich", "pyarrow", "sitecustomize", "usercustomize"),
}
SMALL = "--ranks 2 --tokens 8 --hidden 256 --experts 4 --topk 2 --iterations 1".split()  # noqa: SIM905 - as typed


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A directory of everybody's, with a module of each name that says it was imported."""
    directory = tmp_path / "planted"
    directory.mkdir()
    directory.chmod(0o1777)
    text = f"with open({str(tmp_path / 'imported')!r}, 'a') as file:\n    file.write(__name__ + ' ')\nraise SystemExit"
    for name in NAMES:
        (directory / f"{name}.py").write_text(text)
    return directory


def imported(planted: Path) -> str:
    told = planted.with_name("imported")
    return told.read_text() if told.exists() else ""


def run(words: list[object], cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_commands_import_nothing_from_the_working_directory(planted: Path, tmp_path: Path):
    capture = tmp_path / "capture"
    for words in (
        ["run", "moe", *SMALL, "-o"],
        ["info"],
        ["report", "-o", str(tmp_path / "report.html")],
        ["export", "-o", str(tmp_path / "trace.json")],
    ):
        run([TRACEKERN, *words, capture], planted, {**os.environ, "PYTHONPATH": ""})
        assert imported(planted) == "", words
    words = [TRACEKERN, "open", "--offline", "--no-browser", capture]
    with subprocess.Popen(words, cwd=planted, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout.readline().startswith("http")
        serving.kill()
    assert imported(planted) == ""


SCRIPT = """
    import os, sys, textwrap
    from tracekern.launcher.launch import launch_ranks
    from tracekern.segment.keeper import Keeper
    from tracekern.segment.writer import SegmentWriter

    os.chdir(sys.argv[1])
    sys.path.insert(0, "")  # as in an interactive Python
    for target in ("mine:main", "mine_with_threads:main"):
        (end,) = launch_ranks(1, target)
        assert end.returncode == 7, end
    segment = SegmentWriter.create(f"planted-{os.getpid()}", 0, {}, 1 << 16)
    try:
        Keeper(segment, "GPU-0", os.open("/dev/null", os.O_RDONLY), 64)
    except RuntimeError as error:
        print(error)
    finally:
        segment.unlink()
"""


def test_ranks_and_keepers_of_a_script_import_nothing_from_the_working_directory(planted: Path, tmp_path: Path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "script.py").write_text(textwrap.dedent(SCRIPT))
    (scripts / "mine.py").write_text("import json, sibling\n\ndef main():\n    return 7\n")
    (scripts / "sibling.py").write_text("")
    threads = "import threading, time\n\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (scripts / "mine_with_threads.py").write_text(f"{threads}\nfrom mine import main\n")
    # The empty entry is the working directory, too.
    said = run([sys.executable, scripts / "script.py", planted], scripts, {**os.environ, "PYTHONPATH": f":{ROOT}:"})
    assert imported(planted) == ""
    assert "the keeper said" in said
    assert "without its kernels for GPUs" in said or "GPU-0" in said, "of a keeper that started, and has no such device"


@pytest.mark.parametrize("how", ["-c", "-m", "PYTHONPATH"])
def test_a_function_is_found_where_the_user_imports_from(tmp_path: Path, how: str):
    """In an interactive Python, or where a module is run, that is the working directory."""
    for name in ("mine", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "target.py").write_text(f"from sibling import main  # {name}\n")
        (tmp_path / name / "sibling.py").write_text(f"def main():\n    print('this is {name}')\n")
    launch = "from tracekern import launch_ranks; launch_ranks(1, 'target:main')"
    (tmp_path / "mine" / "launching.py").write_text(launch)
    words = {"-c": ["-c", launch], "-m": ["-m", "launching"], "PYTHONPATH": [tmp_path / "elsewhere.py"]}[how]
    (tmp_path / "elsewhere.py").write_text(launch.replace("'target:main'", "'target:main', env={'PYTHONPATH': 'mine'}"))
    cwd = tmp_path if how == "PYTHONPATH" else tmp_path / "mine"
    assert run([sys.executable, *words], cwd, {**os.environ, "PYTHONPATH": str(ROOT)}) == "[rank 0] this is mine\n"
