"""The plugin in real inner pytest runs, with real captures of kernels that take known times."""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import runs

from tests.paths import TESTS
from tracekern.errors import BadInput
from tracekern.gate.compare import needed_for
from tracekern.gate.pytest_runs import TestRuns, read
from tracekern.gate.run import Run

pytest_plugins = ["pytester"]

IS_INSTALLED = any(entry.value == "tracekern.gate.pytest_plugin" for entry in entry_points(group="pytest11"))
PLUGIN = () if IS_INSTALLED else ("-p", "tracekern.gate.pytest_plugin")

ONE_KERNEL = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np
import pytest
from launched import COPY_NS, WAIT_NS, SPANS, EVENTS, write_track
import json

FACTOR = {factor}

def run_kernel(capture, room=4 * SPANS):
    launched = capture.launch("dispatch", grid=1, warps=1, events=json.dumps(EVENTS), epoch=1)
    means = 100 * np.array([COPY_NS, WAIT_NS * FACTOR])  # recording costs nothing beside it, on a busy machine too
    write_track(launched.descriptor, 0, 10**15, means, np.random.default_rng(1))

def test_waits(tracekern_capture, stall_budget):
    for _ in range({captures}):
        with tracekern_capture(clocks=False, records_per_track={room}) as capture:
            run_kernel(capture)
    assert tracekern_capture.statistics.num_measured == 1
    assert len(tracekern_capture.timeline.spans) > 20
    stall_budget({budget!r}, "wait_token.wait_share=90%")

def test_without():
    pass
"""


@pytest.fixture
def inner(pytester, monkeypatch):
    """Writes the inner test and runs pytest on it, in this process or in one of its own."""
    root = str(TESTS.parent)
    monkeypatch.setenv("PYTHONPATH", root)
    # The next text of the test may be as long, and of the same second: what was compiled would be taken for it.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(
        *arguments: str,
        factor: float = 1.0,
        captures: int = 1,
        room: int = 200,
        budget: str = "wait_token.p50=1ms",
        in_a_process: bool = False,
    ):
        text = ONE_KERNEL.format(tests=str(TESTS), factor=factor, captures=captures, room=room, budget=budget)
        pytester.makepyfile(test_inner=text)
        how = pytester.runpytest_subprocess if in_a_process else pytester.runpytest_inprocess
        return how(*PLUGIN, "-p", "no:cacheprovider", *arguments)

    return run


def kept(pytester) -> list[Path]:
    return sorted((pytester.path / ".tracekern").rglob("*.json"))


def test_a_budget_that_holds_and_one_that_does_not(inner, pytester):
    inner(in_a_process=True).assert_outcomes(passed=2)
    result = inner(budget="wait_token.p50=150us", in_a_process=True)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*over the stall budget*", "dispatch.wait_token.p50 is * us, its budget is 150 us (+*%)"]
    )
    assert kept(pytester) == []


def test_a_lossy_capture_meets_no_budget(inner):
    result = inner(room=50)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*no budget can be judged*", "cannot say:*proves nothing*"])


def test_a_budget_for_nothing_says_what_there_is(inner):
    result = inner(budget="wait_tokens.p50=1us")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([">       stall_budget(*", "E *no such metric; similar are *wait_token.p50*"])
    result.stdout.no_fnmatch_line("*budget.py*")


def test_a_budget_without_a_capture_says_so(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    pytester.makepyfile("def test_it(stall_budget):\n    stall_budget('wait_token.p50=1us')\n")
    result = pytester.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["E *no capture was opened: with tracekern_capture() as capture: ..."])


def test_save_compare_fail(inner, pytester):
    saved = inner("--tracekern-save", in_a_process=True)
    saved.assert_outcomes(passed=2)
    saved.stdout.fnmatch_lines(["saved 1 test as *0001_*"])
    (path,) = kept(pytester)
    assert list(json.loads(path.read_text())["tests"]) == ["test_inner.py::test_waits"]

    same = inner("--tracekern-compare", "--tracekern-compare-fail=p50:15%")
    assert same.ret == 0
    same.stdout.fnmatch_lines(["compared with *0001_*", "*dispatch.wait_token.p50 * (+0.0 %)"])

    slow = inner("--tracekern-compare-fail=p50:15%", "--tracekern-save", factor=1.2)
    slow.assert_outcomes(passed=2)
    assert slow.ret == pytest.ExitCode.TESTS_FAILED
    slow.stdout.fnmatch_lines(["not saved: *", "*wait_token.p50 * (+2?.* %), more than 15 % (fewer than 5 runs*"])
    assert len(kept(pytester)) == 1

    assert inner("--tracekern-compare=1", "--tracekern-compare-fail=p50:25%", factor=1.2).ret == 0
    assert inner("--tracekern-compare", factor=1.2).ret == 0, "without a limit it only tells"


def test_five_captures_a_side_are_a_proof(inner):
    assert inner("--tracekern-save", captures=5).ret == 0
    slow = inner("--tracekern-compare-fail=p50:15%", factor=1.3, captures=5)
    assert slow.ret == pytest.ExitCode.TESTS_FAILED
    slow.stdout.fnmatch_lines(["*more than 15 %"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tracekern-compare"], "no baseline in .tracekern/pytest"),
        (["--tracekern-compare=7"], "no baseline 7"),
        (["--tracekern-compare=nothing.json"], "nothing.json: cannot be read"),
        (["--tracekern-compare-fail=p50"], "wanted p50|p99|wait_share|wait_per_iteration:PERCENT"),
        (["--tracekern-save", "-n", "2"], "without pytest-xdist"),
    ],
)
def test_bad_options_stop_before_any_test(inner, arguments, said):
    result = inner(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{said}*"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is no baseline of tests of version 1"),
        ('{"format": "tracekern-baseline", "version": 1}', "is no baseline of tests of version 1"),
        ('{"format": "tracekern-pytest", "version": 1, "tests": {"a": []}}', "holds no tests"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_what_is_no_baseline_of_tests_is_refused(tmp_path, text, said):
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(BadInput, match=f"old.json: {said}"):
        read(tmp_path / "old.json")


def test_a_suite_that_does_not_use_it_pays_nothing(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    pytester.makepyfile("import sys\ndef test_light():\n    assert not {'numpy', 'torch'} & set(sys.modules)\n")
    blocked = [argument for name in ("hypothesispytest", "xdist", "timeout") for argument in ("-p", f"no:{name}")]
    pytester.runpytest_subprocess(*PLUGIN, *blocked).assert_outcomes(passed=1)
    assert sys.version_info >= (3, 10)


@pytest.mark.parametrize("num_runs", [1, 5])
def test_what_grew_from_nothing_grew(num_runs):
    phase = "dispatch.wait_token"

    def side(first: int, share: float, node: str) -> list[Run]:
        metrics = {f"{phase}.wait_share": share, f"{phase}.wait_per_iteration": 1e7 * share}
        return [runs.make_run(first + number, metrics, nodes=(node,)) for number in range(num_runs)]

    base, head = side(0, 0.0, "node-a"), side(100, 0.4, "node-b")
    session = TestRuns(Path("storage"), False, Path("baseline"), {"t": base}, {"wait_share": 0.2}, {"t": head})
    session.finish(all_passed=True)
    (failure,) = session.failures
    assert "0 % -> 40 %" in failure
    assert session.lines[0] == "compared with baseline"
    unchanged = TestRuns(Path("storage"), False, Path("baseline"), {"t": base}, {"wait_share": 0.2}, {"t": base})
    unchanged.finish(all_passed=True)
    assert unchanged.failures == []
    old = [dataclasses.replace(run, metrics={f"{phase}.wait_share": 0.0}) for run in base]
    session = TestRuns(Path("storage"), False, Path("baseline"), {"t": old}, {"wait_share": 0.2}, {"t": head})
    session.finish(all_passed=True)
    (failure,) = session.failures
    assert f"cannot say: base lacks {phase}.wait_per_iteration" in failure


@pytest.mark.parametrize("num_runs", [1, 5])
def test_a_metric_that_is_gone_is_not_left_unheld(num_runs):
    base, head = (
        [runs.make_run(side + number, {name: 1000.0}) for number in range(num_runs)]
        for side, name in ((0, "dispatch.wait_token.p50"), (100, "dispatch.wait_renamed.p50"))
    )
    for limits, said in (
        ({"p50": 0.15}, ["t: cannot say: gone: dispatch.wait_token.p50"]),
        ({"p99": 0.15}, []),
        ({}, []),
    ):
        session = TestRuns(Path("storage"), False, Path("baseline"), {"t": base}, limits, {"t": head})
        session.finish(all_passed=True)
        assert [failure.partition(" is in ")[0] for failure in session.failures] == said


@pytest.mark.parametrize("num_runs", [1, 5])
@pytest.mark.parametrize(
    ("name", "before", "after", "num_spans", "fails"),
    [
        ("dispatch.wait_token.p99", 1000.0, 1200.0, 32, False),  # little but the longest span
        ("dispatch.wait_token.p99", 1000.0, 1200.0, 100, True),
        ("dispatch.wait_token.p50", 64.0, 96.0, 500, False),  # one tick of 32 ns
        ("dispatch.wait_token.p50", 64.0, 160.0, 500, True),
        ("dispatch.wait_token.p50", 0.0, 32.0, 500, False),
        ("dispatch.wait_token.p50", 0.0, 160.0, 500, True),
        ("gemm[fp8].wait_token.p50", 1000.0, 1300.0, 500, True),
        ("dispatch.wait_token.wait_share", 0.02, 0.025, 500, False),  # half a hundredth of the time
    ],
)
def test_what_the_instrument_may_have_made_fails_nothing(num_runs, name, before, after, num_spans, fails):
    base, head = (
        [runs.make_run(side + number, metrics) for number in range(num_runs)]
        for side, value in ((0, before), (100, after))
        for metrics in [{needed: value if needed == name else 1e6 * value for needed in needed_for(name)}]
    )
    base = [dataclasses.replace(run, spans={"dispatch.wait_token": num_spans}) for run in base]
    limits = {name.rpartition(".")[2]: 0.15}
    session = TestRuns(Path("storage"), False, Path("baseline"), {"t": base}, limits, {"t": head})
    session.finish(all_passed=True)
    assert bool(session.failures) == fails
    assert any(name in line for line in (*session.failures, *session.lines))
