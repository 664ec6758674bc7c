"""Stall budgets and baselines in users' own tests: fixtures `tracekern_capture` and `stall_budget`, and options.

    def test_dispatch(tracekern_capture, stall_budget):
        with tracekern_capture() as capture:
            run_my_kernel(capture)
        stall_budget("wait_token.p99=20us")

A pytest process is one launch of the program, however often a test repeats its kernels in one capture. Captures that a
test opens one after the other count as separate runs; a comparison of them takes that for granted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tracekern.errors import TracekernError

if TYPE_CHECKING:
    from tracekern.analysis.statistics import RunStatistics
    from tracekern.gate.pytest_runs import TestRuns
    from tracekern.gate.report import Report
    from tracekern.gate.run import Run

_RUNS: pytest.StashKey[TestRuns] = pytest.StashKey()


class CaptureFixture:
    """The fixture `tracekern_capture`. Call it to open a capture, or pass `new_directory()` to a program."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._captures: list[Path] = []
        self._runs: dict[Path, Run] = {}

    def __call__(self, **options: Any) -> Any:
        """Returns tracekern.capture(...) with these options, into a new directory of the test."""
        from tracekern.record.session import capture

        return capture(self.new_directory(), **options)

    def new_directory(self) -> Path:
        """Returns a directory for one more capture."""
        self._captures.append(self._directory / f"capture_{len(self._captures):02}")
        self._captures[-1].mkdir(parents=True)
        return self._captures[-1]

    @property
    def directory(self) -> Path:
        """Directory of the newest capture. Raises TracekernError if none was opened."""
        if not self._captures:
            raise TracekernError("no capture was opened: with tracekern_capture() as capture: ...")
        return self._captures[-1]

    @property
    def timeline(self) -> Any:
        """The newest capture as a Timeline."""
        from tracekern.timeline.load import load

        return load(self.directory)

    @property
    def statistics(self) -> RunStatistics:
        """Statistics of the newest capture."""
        from tracekern.analysis.statistics import phase_statistics

        return phase_statistics(self.timeline)

    @property
    def runs(self) -> list[Run]:
        """Runs of the captures so far, one for each."""
        from tracekern.gate.run import read_run

        for path in self._captures:
            if path not in self._runs:
                self._runs[path] = read_run(path)
        return [self._runs[path] for path in self._captures]


class StallBudget:
    """The fixture `stall_budget`. Call it with budgets as the command line takes them."""

    def __init__(self, captures: CaptureFixture) -> None:
        self._captures = captures

    def __call__(self, *budgets: str) -> None:
        """Fails the test if a median over its captures is over its budget, or if a capture lost records."""
        __tracebackhide__ = True  # the traceback should end at the test's line
        from tracekern.formatting import growth, metric_value

        try:
            directory, report = self._captures.directory, self._check(budgets)
        except TracekernError as error:
            raise pytest.fail.Exception(str(error)) from None
        over = [result for result in report.budgets if not result.ok]
        lines = [f"cannot say: {problem}" for problem in report.all_problems]
        for result in over:
            value, limit = (metric_value(result.metric, number) for number in (result.value, result.budget.limit))
            by = f" ({growth(result.value / result.budget.limit - 1)})" if result.budget.limit else ""
            lines.append(f"{result.metric} is {value}, its budget is {limit}{by}")
        if lines:
            lines.append(f"capture: {directory}")
            pytest.fail(
                "\n".join(["over the stall budget" if over else "no budget can be judged", *lines]), pytrace=False
            )

    def _check(self, budgets: tuple[str, ...]) -> Report:
        from tracekern.gate.budget import parse_budget
        from tracekern.gate.check import check

        if not budgets:
            raise TracekernError("stall_budget: no budget given; wanted for example 'wait_token.p99=20us'")
        return check(self._captures.runs, None, list(map(parse_budget, budgets)))


@pytest.fixture
def tracekern_capture(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Opens captures for this test: `with tracekern_capture() as capture:`; afterwards .timeline and .statistics."""
    captures = CaptureFixture(tmp_path / "tracekern")
    yield captures
    test_runs = request.config.stash.get(_RUNS, None)
    if test_runs is None:
        return
    try:
        runs = captures.runs
    except TracekernError as error:
        test_runs.failures.append(f"{request.node.nodeid}: {error}")
        return
    if runs:
        test_runs.tests[request.node.nodeid] = runs


@pytest.fixture
def stall_budget(tracekern_capture: CaptureFixture) -> StallBudget:
    """Fails the test if its captures wait longer: `stall_budget("wait_token.p99=20us")`."""
    return StallBudget(tracekern_capture)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tracekern", "stalls inside GPU kernels")
    group.addoption("--tracekern-save", action="store_true", help="keep the captures' numbers as a new baseline")
    group.addoption(
        "--tracekern-compare",
        nargs="?",
        const="latest",
        metavar="BASELINE",
        help="compare with a baseline: latest, a number as in 0003, or a file",
    )
    group.addoption(
        "--tracekern-compare-fail",
        action="append",
        default=[],
        metavar="STATISTIC:PERCENT",
        help="fail where a median grew by more, as in p50:15%%; repeatable",
    )
    group.addoption("--tracekern-storage", type=Path, default=Path(".tracekern"), help="where baselines are kept")


def pytest_configure(config: pytest.Config) -> None:
    save, compare, fail = (config.getoption(f"tracekern_{name}") for name in ("save", "compare", "compare_fail"))
    if not (save or compare or fail):
        return
    from tracekern.gate.pytest_runs import TestRuns

    if getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        raise pytest.UsageError(
            "--tracekern-save and --tracekern-compare time kernels: run them without pytest-xdist's -n"
        )
    try:
        config.stash[_RUNS] = TestRuns.open(config.getoption("tracekern_storage"), save, compare, fail)
    except TracekernError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_sessionfinish(session: pytest.Session) -> None:
    test_runs = session.config.stash.get(_RUNS, None)
    if test_runs is None:
        return
    test_runs.finish(all_passed=session.exitstatus == pytest.ExitCode.OK)
    if test_runs.failures and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    test_runs = config.stash.get(_RUNS, None)
    if test_runs is None:
        return
    terminalreporter.section("tracekern")
    for line in test_runs.lines:
        terminalreporter.write_line(line)
    for line in test_runs.failures:
        terminalreporter.write_line(line, red=True)
