"""One more of a kind is new files only: a toy of each, added to a copy of the tree, is found wherever it counts.

tests/toys has the files; tests/test_write.py has a toy format.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from toolchains import ROOT, compile_sm_90

import tracekern

TOYS = ROOT / "tests" / "toys"


def tree_with(toy: str, tree: Path) -> Path:
    """A copy of the tree with the files of a toy, none of which it had."""
    left_out = shutil.ignore_patterns("*.so", "__pycache__", "include", "viewers")
    for name in ("csrc", "tracekern"):
        shutil.copytree(ROOT / name, tree / name, ignore=left_out)
    shutil.copytree(ROOT / "viewers", tree / "tracekern" / "viewers", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    added = [path.relative_to(TOYS / toy) for path in (TOYS / toy).rglob("*.*") if path.is_file()]
    assert added
    assert [path for path in added if (tree / path).exists()] == []
    shutil.copytree(TOYS / toy, tree, dirs_exist_ok=True)
    return tree


def python(tree: Path, *words: object) -> str:
    """What Python prints with the tree's package; the words follow `python`."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200", "TRACEKERN_CUDA": "0"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tree_with("family", tmp_path_factory.mktemp("family"))
    python(tree, "setup.py", "-q", "build_ext", "--inplace")
    return tree


def test_a_kernel_family_is_two_new_folders(family: Path, tmp_path: Path):
    shown = python(family, "-m", "tracekern", "run", "moe", "--help")
    assert "toy" in shown.split("--variant")[1].split("--")[0]
    shape = ("--ranks", 3, "--tokens", 9, "--hidden", 97, "--experts", 6, "--topk", 2, "--iterations", 2)
    told = json.loads(
        python(family, "-m", "tracekern", "run", "moe", "--variant", "toy", *shape, "-o", tmp_path, "--json")
    )
    assert told["runs"][0]["options"]["variant"] == "toy"
    timeline = tracekern.load(tmp_path)
    assert {"signal_here", "wait_here", "copy_token"} <= {event.name for event in timeline.events}
    assert {launch.name for launch in timeline.launches} == {"rank_barrier", "echo"}
    assert len(timeline.flows) >= 3 * 3 * 2  # each rank tells each, in two calls


@pytest.mark.compilers
def test_its_kernels_are_compiled_for_gpus_as_all_others(tmp_path: Path):
    tree = tree_with("family", tmp_path)
    compile_sm_90(tree / "csrc" / "moe" / "toy" / "kernels.cu", include=tree / "csrc")
