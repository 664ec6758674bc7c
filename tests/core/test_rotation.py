"""Which tests about sources run: all after a change of what they include, else those whose turn it is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rotation import PARTS, ROOT, is_turn_of

PROGRAM = """
import sys, pathlib, pytest, rotation
rotation.ROOT = pathlib.Path.cwd()
rotation.SETTLED = rotation.ROOT / "settled.json"
rotation.HELPERS = rotation.COMPILERS = ()
rotation.commit_number = lambda: int(sys.argv[1])

class Options:
    def pytest_addoption(self, parser):
        parser.addoption("--all", action="store_true")
    def pytest_configure(self, config):
        config.pluginmanager.register(rotation.Rotation(config))

sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:tracekern", *sys.argv[2:]], plugins=[Options()]))
"""
TESTS = """
import pathlib, pytest

@pytest.mark.programs("csrc/kernel.cu")
@pytest.mark.parametrize("case", range(3))
def test_a_kernel(case):
    assert "wrong" not in pathlib.Path("csrc/order.h").read_text()

@pytest.mark.rotates
def test_an_example():
    pass

@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", range(3))
def test_a_variant(case):
    pass
"""
TURN = next(turn for turn in range(PARTS) if is_turn_of("tests/test_it.py::test_a_kernel", turn, PARTS))
NO_TURN = TURN + 1


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "tests/test_it.py": TESTS,
        "csrc/kernel.cu": '#include "order.h"\n',
        "csrc/order.h": "right\n",
        "pytest.ini": "[pytest]\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def ran(tree: Path, turn: int, *words: str) -> tuple[int, int]:
    """How many passed, and how many failed."""
    command = [sys.executable, "-c", PROGRAM, str(turn), *(words or ("tests",))]
    environment = {"PYTHONPATH": str(ROOT / "tests"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    counts = [re.search(rf"(\d+) {word}", done.stdout) for word in ("passed", "failed")]
    return tuple(int(count[1]) if count else 0 for count in counts)


def test_sources_that_passed_are_left_to_their_turn_until_they_change(tree):
    example = int(is_turn_of("tests/test_it.py::test_an_example", NO_TURN, PARTS))
    assert ran(tree, NO_TURN) == (3 + example + 1, 0)
    assert list(json.loads((tree / "settled.json").read_text())) == ["test_it: csrc/kernel.cu"]
    assert ran(tree, NO_TURN) == (example + 1, 0)
    assert ran(tree, TURN)[0] >= 3 + 1
    (tree / "csrc" / "order.h").write_text("another\n")
    assert ran(tree, NO_TURN) == (3 + example + 1, 0)


def test_sources_whose_tests_fail_run_again(tree):
    (tree / "csrc" / "order.h").write_text("wrong\n")
    for _ in range(2):
        assert ran(tree, NO_TURN)[1] == 3
    assert not (tree / "settled.json").exists()


def test_who_asks_for_all_or_names_a_file_gets_all(tree):
    assert ran(tree, NO_TURN, "--all", "tests") == ran(tree, NO_TURN, "tests/test_it.py") == (3 + 1 + 3, 0)


def test_one_case_of_three_runs(tree):
    others = ("--deselect", "tests/test_it.py::test_a_kernel", "--deselect", "tests/test_it.py::test_an_example")
    assert [ran(tree, turn, "tests", *others) for turn in range(2)] == [(1, 0)] * 2
