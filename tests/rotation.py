"""Which of the long native tests a run has: all whose sources have changed, and of the others a part by commit.

Tests that compile and attack kernels are marked with the sources that they are about:

    pytestmark = pytest.mark.programs("tests/cpp/p2p_stress.cpp")

SETTLED keeps a hash of these sources, with all that they include and the file of the tests, from when all tests about
them passed. Where it is still right, a run has one of PARTS of the marked functions, and of a function with many cases
a part of these; with `rotates=False` none. A run that had all tests about sources, and saw them pass, writes their
hash. Tests marked `rotates` (long runs of examples and benchmarks) belong to a part each, and of a test marked
`one_in(n)` each nth case runs. `make soak` has all, and so has a run of files or tests by name.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from kept_builds import COMPILERS, compiler, included_files
from paths import ROOT

SETTLED = ROOT / "tests" / "settled.json"
HELPERS = tuple(ROOT / "tests" / name for name in ("attack.py", "left_out.py", "toolchains.py"))
PARTS = 8
"""Parts of the functions; a commit later it is the turn of the next one."""
CASE_PARTS = 4
"""Parts of the cases of a function with more than that."""


def sources_of(item: pytest.Item) -> tuple[str, ...]:
    """The sources that a test is about, from the root of the project; () for one that is not marked."""
    mark = item.get_closest_marker("programs")
    if mark is None:
        return ()
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    own = next((str(value) for name, value in parameters.items() if name == "source"), "")
    if not own:
        return tuple(mark.args)
    path = Path(own) if Path(own).is_absolute() else ROOT / "csrc" / own
    return (str(path.relative_to(ROOT)),)


@functools.cache
def fingerprint(sources: tuple[str, ...], test_file: Path) -> str:
    """A hash of the sources, with all of csrc and tests/cpp that they include, and of the file of their tests."""
    found = included_files([ROOT / name for name in sources], [ROOT / "csrc", ROOT / "tests" / "cpp"])
    hashed = hashlib.sha256()
    for path in sorted({*found, test_file, *HELPERS}):
        hashed.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return hashed.hexdigest()[:16]


def settled() -> dict[str, str]:
    return json.loads(SETTLED.read_text()) if SETTLED.exists() else {}


@functools.cache
def commit_number() -> int:
    """How many commits there are; 0 outside of git."""
    command = ["git", "rev-list", "--count", "HEAD"]
    counted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return int(counted.stdout) if counted.returncode == 0 else 0


def is_turn_of(name: str, number: int, parts: int) -> bool:
    return zlib.crc32(name.encode()) % parts == number % parts


def turn_name(item: pytest.Item) -> str:
    """By which a test marked `rotates` belongs to a part: that of the mark, if it has one, or its own."""
    return next(iter(item.get_closest_marker("rotates").args), item.nodeid)


def is_due(item: pytest.Item, num_cases: int) -> bool:
    """Whether it is the turn of a test whose sources have not changed."""
    if not item.get_closest_marker("programs").kwargs.get("rotates", True):
        return False
    if not is_turn_of(item.nodeid.partition("[")[0], commit_number(), PARTS):
        return False
    return num_cases <= CASE_PARTS or is_turn_of(item.nodeid, commit_number() // PARTS, CASE_PARTS)


def other_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of tests marked `one_in(n)` whose turn it is not."""
    seen: Counter[str] = Counter()
    found = set()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            function = item.nodeid.partition("[")[0]
            if (seen[function] + commit_number()) % mark.args[0]:
                found.add(item)
            seen[function] += 1
    return found


class Rotation:
    """Selects, says what it has selected, and writes SETTLED. With xdist each worker selects."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._hashes: dict[str, str] = {}
        """Hashes of the sources of which this run has all tests."""
        self._keys: dict[str, str] = {}
        """Test -> key of its sources."""
        self._passed: set[str] = set()
        self._failed: set[str] = set()
        self._told = ""
        self._is_whole = True

    @pytest.hookimpl(trylast=True)  # after -k and -m
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        by_key: dict[str, list[pytest.Item]] = defaultdict(list)
        # Who names files or tests means all of them.
        runs_all = config.getoption("--all") or config.option.keyword or not all(map(os.path.isdir, config.args))
        rotating = [item for item in items if item.get_closest_marker("rotates")]
        for item in items:
            if sources := sources_of(item):
                by_key[f"{item.path.stem}: {', '.join(sources)}"].append(item)
        num_in_turns = sum(item.get_closest_marker("one_in") is not None for item in items)
        num_cases = Counter(item.nodeid.partition("[")[0] for own in by_key.values() for item in own)
        known, left_out = settled(), set()
        for key, own in by_key.items():
            made_from = fingerprint(sources_of(own[0]), own[0].path)
            if not runs_all and known.get(key) == made_from:
                left_out |= {item for item in own if not is_due(item, num_cases[item.nodeid.partition("[")[0]])}
            else:
                self._hashes[key] = made_from
                self._keys |= {item.nodeid: key for item in own}
        if not runs_all:
            left_out |= {item for item in rotating if not is_turn_of(turn_name(item), commit_number(), PARTS)}
            left_out |= other_cases(items)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
        num_marked = sum(num_cases.values()) + len(rotating) + num_in_turns
        whole = ", ".join(sorted({key.partition(":")[0] for key in self._hashes})) or "none"
        self._told = (
            f"long tests: {num_marked - len(left_out)} of {num_marked}; all of {whole}, whose sources have changed, "
            f"and of the others part {commit_number() % PARTS + 1} of {PARTS}"
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        found = [self._hashes, self._keys, self._told]
        if hasattr(self._config, "workerinput"):
            self._config.workeroutput["rotation"] = found
        else:
            self._write()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._hashes, self._keys, self._told = getattr(node, "workeroutput", {}).get("rotation", ({}, {}, ""))
        self._is_whole = self._is_whole and not error

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(self._told)

    def _write(self) -> None:
        """Keeps the hashes of sources about which all tests passed, where all were asked for."""
        option = self._config.option
        is_part = option.keyword or option.markexpr not in ("", "not soak") or getattr(option, "lf", False)
        if is_part or not self._is_whole or any("::" in name for name in self._config.args):
            return
        if any(compiler(name) is None for name in COMPILERS):
            return  # what such a machine skips has not passed
        shown = {self._keys[test] for test in self._passed if test in self._keys}
        bad = {self._keys[test] for test in self._failed if test in self._keys} | (set(self._hashes) - shown)
        passed = {key: made_from for key, made_from in self._hashes.items() if key not in bad}
        if passed and (known := settled()) | passed != known:
            partial = SETTLED.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(dict(sorted((known | passed).items())), indent=1) + "\n")
            partial.replace(SETTLED)
