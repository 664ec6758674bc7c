"""The variables TRACEKERN_*: which there are, what is no number, and what is misspelt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tracekern import environment
from tracekern.errors import BadInput
from tracekern.launcher.launch import launch_ranks

LIMIT = "TRACEKERN_GROUP_TIMEOUT_S"


def test_the_list_has_what_the_code_reads_and_nothing_else():
    folders = [ROOT / name for name in ("tracekern", "csrc", "tests", "benchmarks", "examples", ".ci")]
    suffixes = {"", ".py", ".h", ".hpp", ".cuh", ".cpp", ".cu", ".yml"}
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes and path.is_file()]
    left_out = {Path(environment.__file__), Path(__file__)}
    read = {
        name
        for path in {ROOT / "setup.py", ROOT / "Makefile", *paths} - left_out
        for name in re.findall(r"\bTRACEKERN_[A-Z][A-Z_]*[A-Z]\b", path.read_text(errors="replace"))
    }
    assert read == {f"TRACEKERN_{name}" for name in environment.NAMES}


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tracekern", *words]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("text", ["1m", "", "0", "-1", "nan", "inf"])
def test_what_is_no_number_is_one_line(text: str):
    with pytest.raises(
        BadInput, match=f"^{LIMIT}={text}: wanted a number above 0, such as 60; set it so, or unset it$"
    ):
        environment.positive_number(LIMIT, 60, {LIMIT: text})
    assert environment.positive_number(LIMIT, 60, {LIMIT: "2.5"}) == 2.5
    assert environment.positive_number(LIMIT, 60, {}) == 60


def test_the_command_line_refuses_it_before_it_starts_ranks():
    done = run("run", "moe", "--ranks", "2", "--no-trace", **{LIMIT: "1m"})
    assert (done.returncode, done.stdout) == (2, "")
    said = done.stderr.splitlines()[-1]  # behind what other runs of this machine may have left
    assert said == f"tracekern: {LIMIT}=1m: wanted a number above 0, such as 60; set it so, or unset it"
    with pytest.raises(BadInput, match=f"{LIMIT}=1m: wanted a number"):
        launch_ranks(1, [sys.executable, "-c", ""], env={LIMIT: "1m"})


def test_a_misspelt_variable_is_named_once():
    done = run("salvage", "--json", **{"TRACEKERN_" + "RUNID": "x", "TRACEKERN_" + "QZW": "y", LIMIT: "60"})
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "TRACEKERN_" + "QZW is not read",
        "TRACEKERN_" + "RUNID is not read; did you mean TRACEKERN_RUN_ID?",
    ]


OPENS_TWICE = """
from tracekern.launcher.launch import launch_ranks
from tracekern.record.session import capture
import sys
for name in "ab":
    with capture(sys.argv[1] + "/" + name, device="cpu", max_bytes=1 << 20):
        pass
launch_ranks(2, [sys.executable, "-c", "import tracekern.record.setup as s; s.warn_of_unread()"])
"""


def test_a_program_of_ones_own_says_so_once_and_its_ranks_do_not(tmp_path: Path):
    words = [sys.executable, "-c", OPENS_TWICE, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRACEKERN_" + "RUNID": "x"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("is not read") == 1
