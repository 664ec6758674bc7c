"""Starts ranks as forks of one warm process, which has imported the target's module, and torch with it, once.

Eight interpreters that import torch each take eight times its second of CPU. `Spawner` is the launcher's end;
`python -m tracekern.record.spawner` is the warm process. It tells of what happens in lines of JSON over a pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_CLOSE_S = 5.0
_LIBC = ctypes.CDLL(None, use_errno=True)


class Spawner:
    """`ranks[rank]`: the processes, which may start some time after this returns."""

    def __init__(self, target: str, num_ranks: int, env: Mapping[str, str]) -> None:
        """target: module:function. env: of the ranks, but for RANK and LOCAL_RANK.

        What the module prints while it is imported comes as rank 0's output.
        """
        parent = os.getpid()
        pipes = [os.pipe() for _ in range(num_ranks + 1)]
        self._reports, *outputs = (read for read, _ in pipes)
        writes = [write for _, write in pipes]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tracekern.record.spawner", target, *map(str, writes)],
                # More threads would start with numpy, and only a process of one thread may be forked.
                env={"OMP_NUM_THREADS": "1", **env},
                stdin=subprocess.PIPE,
                stdout=writes[1],
                stderr=subprocess.STDOUT,
                pass_fds=writes,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),
            )
        finally:
            for write in writes:
                os.close(write)
        os.set_blocking(self._reports, False)
        self._unread = b""
        self.error = ""
        """Why the module could not be imported."""
        self.ranks = [SpawnedRank(self, self._process.pid, os.fdopen(fd, errors="replace")) for fd in outputs]

    def read_reports(self) -> None:
        """Take in what has happened since."""
        data = b"."
        while data:
            try:
                data = os.read(self._reports, 1 << 16)
            except BlockingIOError:
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        # The warm process is gone, and its ranks with it.
        how = self._process.wait()
        for rank in self.ranks:
            if rank.returncode is None:
                rank.returncode = -signal.SIGKILL if rank.has_started else how

    def _take(self, report: dict[str, Any]) -> None:
        if "error" in report:
            self.error = report["error"]
            return
        rank = self.ranks[report["rank"]]
        rank.pid, rank.has_started = report["pid"], True
        rank.returncode = report.get("returncode")

    def close(self) -> None:
        """Let go of the ranks, which have ended: their process ids may be used again from here on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._process.kill()
        self._process.wait()
        os.close(self._reports)


@dataclass
class SpawnedRank:
    """What the launcher uses of subprocess.Popen, for a process that is not its child."""

    spawner: Spawner
    pid: int
    """The warm process's, until the rank has started."""
    stdout: TextIO
    returncode: int | None = None
    has_started: bool = False

    def poll(self) -> int | None:
        """Exit status, minus the signal's number; None while it runs."""
        if self.returncode is None:
            self.spawner.read_reports()
        return self.returncode

    def wait(self) -> int:
        """Returns the exit status when there is one."""
        while (status := self.poll()) is None:
            time.sleep(_POLL_S)
        return status


def die_with(parent: int) -> None:
    """Runs in the child: the kernel kills it when its parent dies, which may already have happened."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def run_target(target: str) -> NoReturn:
    """Runs module:function as this process's program. An int that it returns is the exit status."""
    module, function = target.split(":")
    _run_and_exit(getattr(importlib.import_module(module), function))


def main() -> None:
    """The warm process. Arguments: module:function, then descriptors: for reports, for the output of each rank."""
    target = sys.argv[1]
    reports, *outputs = (int(word) for word in sys.argv[2:])
    module, name = target.split(":")
    gc.disable()  # a tenth of the time goes into collecting what an import keeps anyway
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        _report(reports, error=" ".join(f"{type(error).__name__}: {error}".split())[:500])
        raise
    gc.freeze()  # ranks share these pages for as long as nobody touches them
    gc.enable()
    sys.stdout.flush()
    sys.stderr.flush()
    is_warm = len(os.listdir("/proc/self/task")) == 1
    if not is_warm:
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: this one does nothing but exec
    spawner, pids = os.getpid(), []
    for rank in range(len(outputs)):
        pids.append(os.fork())
        if pids[-1] == 0:
            _become_rank(rank, spawner, reports, outputs)
            if is_warm:
                sys.argv = [target]
                _run_and_exit(function)
            program = f"from tracekern.record.spawner import run_target; run_target({target!r})"
            os.execv(sys.executable, [sys.executable, "-c", program])
    _connect(Path(os.devnull), 1, 2)
    for output in outputs:
        os.close(output)
    _report_ends(reports, pids)
    sys.stdin.buffer.read()  # the launcher may still signal the last ones: keep their ids taken until it knows
    for pid in pids:
        os.waitpid(pid, 0)
    os._exit(0)  # tearing down torch would cost 0.36 s of CPU, here and in each rank


def _become_rank(rank: int, spawner: int, reports: int, outputs: list[int]) -> None:
    """In the fork: a session, an environment and an output of its own. Tells the launcher when it can be signalled."""
    os.setsid()
    die_with(spawner)
    _connect(Path(os.devnull), 0)
    os.dup2(outputs[rank], 1)
    os.dup2(outputs[rank], 2)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # forks would all draw the same numbers
    _report(reports, rank=rank, pid=os.getpid())
    for descriptor in (reports, *outputs):
        os.close(descriptor)


def _report_ends(reports: int, pids: list[int]) -> None:
    """Returns when all ranks have ended and been reported. They stay zombies."""
    running = dict(enumerate(pids))
    while running:
        time.sleep(_POLL_S)
        for rank, pid in list(running.items()):
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                _report(reports, rank=rank, pid=pid, returncode=status)
                del running[rank]


def _run_and_exit(function: Callable[[], Any]) -> NoReturn:
    """As the interpreter ends a program, but for tearing down what was imported."""
    status, is_interrupted = 0, False
    try:
        result = function()
        status = result if type(result) is int else 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:  # noqa: BLE001 - it is the last one to hear of it
        status, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _report(descriptor: int, **what: Any) -> None:
    """One write of less than PIPE_BUF bytes: lines of several ranks do not mix."""
    os.write(descriptor, json.dumps(what).encode() + b"\n")


def _connect(path: Path, *descriptors: int) -> None:
    source = os.open(path, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(source, descriptor)
    os.close(source)


if __name__ == "__main__":
    main()
