"""`tracekern ARGUMENTS...` in a process of its own that need not import anything: a fork of one that has.

`WarmCommands` is the end of the tests; main() is the process that has imported the commands, one a worker. A second one
has torch as well, for `tracekern run`, and the ranks of a run are forked from it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, NoReturn

from paths import ROOT

PRELOADED = (
    *("numpy.ma", "pyarrow.parquet", "plotly.offline", "junitparser", "email.message", "secrets"),
    *("importlib.metadata", "importlib.resources", "pydantic.main", "pydantic.type_adapter", "pydantic.warnings"),
    *("typer", "typer.rich_utils", "rich.columns", "rich.markdown", "rich.table", "rich.traceback"),
    *("tracekern.cli.main", "tracekern.cli.app", "tracekern.analysis.findings", "tracekern.timeline.load"),
    *("tracekern.segment.salvage", "tracekern.export.write", "tracekern.gate.check", "tracekern.viewers.diff_page"),
    *("tracekern.viewers.report.report_page", "tracekern.viewers.report.headlines", "tracekern.segment.snapshot"),
    *("tracekern.export.first_view", "tracekern.export.formats.perfetto", "tracekern.export.formats.chrome"),
)
"""What commands import: each of hundreds would take 0.1 to 0.5 CPU seconds for it."""
OF_RANKS = (
    "tracekern.moe.workload.worker",
    "tracekern.launcher.spawner",
    "torch.distributed",
    "numpy.random",
    "tracekern._core",
)
# A process of more threads could not be forked safely.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@functools.cache
def warm_commands(with_torch: bool = False) -> WarmCommands:
    """Those of this worker."""
    return WarmCommands((*PRELOADED, *OF_RANKS) if with_torch else PRELOADED)


class WarmCommands:
    """Runs commands one after the other."""

    def __init__(self, preloaded: tuple[str, ...]) -> None:
        self._python = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
        self._preloaded = preloaded
        self._number = 0
        self._start()

    def _start(self) -> None:
        words = [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import warm_command as w; w.main()",
            *self._preloaded,
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._process = subprocess.Popen(words, cwd=ROOT, env=os.environ | ONE_THREAD, **pipes)
        self._received = b""

    def run(self, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """As subprocess.run() would, in the directory and environment that this process has now."""
        words = [sys.executable, "-m", "tracekern", *map(str, arguments)]
        if self._python != {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}:
            return subprocess.run(words, capture_output=True, text=True, timeout=timeout)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
            self._number += 1
            request = {"number": self._number, "words": words[3:], "cwd": os.getcwd(), "env": dict(os.environ)}
            pid = 0
            try:
                self._process.stdin.write(json.dumps(request | {"files": files}).encode() + b"\n")
                pid = self._answer("pid", timeout)
                status = self._answer("status", timeout)
            except BaseException as error:  # answers to come would be taken for those to the next request
                self._stop(pid)
                self._start()
                if isinstance(error, TimeoutError):
                    raise subprocess.TimeoutExpired(words, timeout, _text(out), _text(err)) from None
                raise
            return subprocess.CompletedProcess(words, status, _text(out), _text(err))

    def _answer(self, name: str, timeout: float) -> int:
        """What the process says of the request under this name. Raises TimeoutError."""
        descriptor, end = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._received:
            # On the descriptor: what a buffer of Python's holds already, select() does not see.
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError
            if not (read := os.read(descriptor, 4096)):
                raise RuntimeError(f"the process that runs commands has ended: {self._process.wait()}")
            self._received += read
        line, _, self._received = self._received.partition(b"\n")
        number, answer, value = line.decode().split()
        assert (int(number), answer) == (self._number, name), line
        return int(value)

    def _stop(self, pid: int) -> None:
        if pid:
            with contextlib.suppress(ProcessLookupError):  # it may have ended meanwhile
                os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def main() -> None:
    """Forks a process for each request, a line on standard input, and prints its id and how it ended."""
    sys.path.remove(str(ROOT / "tests"))
    sys.path[0] = str(ROOT)
    for name in sys.argv[1:]:
        with contextlib.suppress(ModuleNotFoundError):
            __import__(name)
    if "torch" in sys.modules:
        sys.modules["tracekern.launcher.spawner"].start_process = ForkedSpawner  # type: ignore[attr-defined]
    gc.freeze()  # forks share these pages as long as none writes to them
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_command(request)
        sys.stdout.write(f"{request['number']} pid {pid}\n")
        sys.stdout.flush()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{request['number']} status {status}\n")
        sys.stdout.flush()


def _become_command(request: dict) -> NoReturn:
    os.setsid()
    for descriptor, path in enumerate([os.devnull, *request["files"]]):
        opened = os.open(path, os.O_RDWR)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    sys.argv = [str(ROOT / "tracekern" / "__main__.py"), *request["words"]]
    from tracekern.cli.main import main as run_command

    status: object = 1
    try:
        run_command()
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status if isinstance(status, int) else 0)


class ForkedSpawner:
    """The part of subprocess.Popen that the launcher uses, for its spawner: a fork of the command, which has torch."""

    def __init__(self, words: list[str], env: Mapping[str, str], prepare: Callable[[], object], *, stdin: int) -> None:
        command, self.returncode = os.getpid(), None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become_spawner(command, words[-1], env, prepare, stdin)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("spawner", timeout)
            time.sleep(0.005)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _become_spawner(
    command: int, target: str, env: Mapping[str, str], prepare: Callable[[], object], stdin: int
) -> None:
    """What stays of a process when it becomes another program."""
    from tracekern.launcher import spawner

    os.setsid()
    spawner.die_with(command)
    os.dup2(stdin, 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    prepare()
    os.environ.clear()
    os.environ.update(env)
    spawner.main(target)


def command(directory: Path, *more: str) -> list[str]:
    words = ["run", "moe", "--ranks", "4", "--tokens", "8", "--hidden", "64", "--experts", "16", "--topk", "2"]
    return [sys.executable, "-m", "tracekern", *words, "-o", str(directory), *more]
