"""Fixtures that several test files use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import browser as chromium
import hypothesis
import kept_builds
import pytest
from lanes import pytest_collection_modifyitems  # noqa: F401 - a hook
from rank_pool import RankPool
from rehearsal import add_option, efa_rules, rehearse  # noqa: F401 - a fixture and a hook
from rotation import Rotation
from warm_command import ONE_THREAD, warm_commands

# Whoever started the tests in the background had Ctrl-C ignored, which every process that they start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where compiled Python is not kept, every worker and each of the hundreds of processes would compile these files anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Before numpy and torch are imported: their threads, in all workers, would wait for each other and take the cores.
os.environ.update(ONE_THREAD)

# On a busy machine any example may take seconds. Examples that failed are kept in .hypothesis and tried again first.
SLOW = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("patient", **SLOW)
hypothesis.settings.register_profile("ci", max_examples=30, **SLOW)
hypothesis.settings.register_profile("soak", max_examples=400, **SLOW)
hypothesis.settings.load_profile("patient")

# Of programs that tests start, too: what one of the examples builds is kept.
os.environ["PATH"] = os.pathsep.join([str(kept_builds.compilers_that_keep()), os.environ["PATH"]])

CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_addoption(parser: pytest.Parser) -> None:
    add_option(parser)
    parser.addoption("--all", action="store_true", help="the tests that take turns, too; see tests/rotation.py")


def pytest_configure(config: pytest.Config) -> None:
    rehearse(config)
    config.pluginmanager.register(Rotation(config))


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        kept_builds.remove_old()


@pytest.fixture
def quick_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For examples, which are tested for what they do: -O2 takes half as long again as -O0."""
    monkeypatch.setenv(kept_builds.QUICK, "1")


def without_dead_runs(stderr: str) -> str:
    """What a command told, but of ranks that another test has killed meanwhile."""
    told = (" left records in shared memory; ", "so did those of ")
    return "".join(line for line in stderr.splitlines(True) if not any(part in line for part in told))


@pytest.fixture(scope="session")
def command_line() -> CommandLine:
    """Runs `tracekern ARGUMENTS...` as a user does: in a process of its own."""

    def run(*arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        takes_torch = arguments[:1] in (("run",), ("overhead",))
        ended = warm_commands(takes_torch).run(*arguments, timeout=timeout)
        ended.stderr = without_dead_runs(ended.stderr)
        return ended

    return run


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """Number of ranks -> a pool of so many, started when it is first asked for."""
    started: dict[int, RankPool] = {}

    def pool(num_ranks: int) -> RankPool:
        if num_ranks not in started:
            started[num_ranks] = RankPool(num_ranks)
        return started[num_ranks]

    yield pool
    for one in started.values():
        one.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[chromium.Browser]:
    """One headless Chromium for all tests of a worker; skips where there is none."""
    with chromium.launch() as launched:
        yield launched
