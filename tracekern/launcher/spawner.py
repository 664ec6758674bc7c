"""Starts ranks as forks of one warm process, which imports the target's module, and torch with it, only once.

Eight interpreters that each import torch would take eight times the CPU time. `Spawner` is the launcher's end; main()
is the warm process. For each run, one after the other, it receives the pipes and the environment of the ranks over its
standard input, a socket. Over the first pipe it reports what happens, in lines of JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tracekern.errors import BadInput
from tracekern.interpreter import python_call
from tracekern.launcher.rendezvous import give_socket
from tracekern.launcher.start import die_with, start_process
from tracekern.launcher.status import exit_status

NUM_RESIDENTS = "TRACEKERN_NUM_RESIDENTS"
"""Environment variable: how many resident ranks a launched process consists of; 0: it is one rank."""
_POLL_S = 0.02
_CLOSE_S = 5.0
_SEND_S = 10.0
_MOST_RANKS = 250  # Linux passes on 253 descriptors at once
_MORE_FILES = "raise the limit of open files (`ulimit -n`), or take fewer ranks"


class Spawner:
    """The warm process, for runs one after the other. Use it as a context manager, or close() it."""

    def __init__(self, target: str, env: Mapping[str, str]) -> None:
        """target: module:function, imported in the environment of the first run when that starts. env: environment of
        the warm process.

        Raises BadInput for a target of another form.
        """
        module, _, function = target.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), function)):
            raise BadInput(f"target {target!r}: wanted module:function, or a list of words for a command")
        self.target = target
        self.error = ""
        """Why the module could not be imported; "" if it was."""
        self.ranks: list[SpawnedRank] = []
        self._env = {**env, "PYTHONUNBUFFERED": "1"}
        self._reports, self._unread = -1, b""
        self._start_process()

    def _start_process(self) -> None:
        try:
            self._requests, requests = socket.socketpair()
            self._requests.settimeout(_SEND_S)
            with requests:
                command, env = python_call(main, self.target, env=self._env, target=self.target.partition(":")[0])
                self._process = start_process(command, env, _block_interrupts, stdin=requests.fileno())
        except OSError as error:
            raise BadInput(f"the ranks cannot be started ({error.strerror}); {_MORE_FILES}") from None

    def __enter__(self) -> Spawner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the warm process."""
        return self._process.pid

    def start(self, num_ranks: int, env: Mapping[str, str], store: socket.socket) -> None:
        """Starts a run: `ranks` becomes its processes, which may start later. Those of the last run must have ended.

        env: environment of the ranks, without RANK and LOCAL_RANK. store: the socket that rank 0 inherits. What the
        module prints during its import appears as rank 0's output. Raises BadInput for too many ranks or open files.
        """
        if num_ranks > _MOST_RANKS:
            raise BadInput(f"{num_ranks} ranks of {self.target}: wanted at most {_MOST_RANKS}")
        self._forget_run()
        if self._process.poll() is not None:  # killed together with the last run
            self._start_process()
        pipes: list[tuple[int, int]] = []
        try:
            pipes.extend(os.pipe() for _ in range(num_ranks + 1))
            self._reports, *outputs = (read for read, _ in pipes)
            os.set_blocking(self._reports, False)
            self.ranks = [SpawnedRank(self, self._process.pid, os.fdopen(fd, errors="replace")) for fd in outputs]
            # More threads would start with numpy, and only a process of one thread may be forked.
            request = json.dumps({"OMP_NUM_THREADS": "1", **env}).encode() + b"\n"
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead; read_reports() finds out
                socket.send_fds(self._requests, [b"."], [store.fileno(), *(write for _, write in pipes)])
                self._requests.sendall(request)
        except OSError as error:
            raise BadInput(f"{num_ranks} ranks cannot be started ({error.strerror or error}); {_MORE_FILES}") from None
        finally:
            for _, write in pipes:
                os.close(write)

    def kill(self) -> None:
        """Kills the warm process, and with it the ranks that have not ended."""
        self._process.kill()
        self._process.wait()
        for rank in self.ranks:
            if rank.returncode is None:
                rank.returncode = -signal.SIGKILL

    def read_reports(self) -> None:
        """Reads the reports since the last call."""
        data = b"."
        while data:
            try:
                data = os.read(self._reports, 1 << 16)
            except BlockingIOError:
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        if all(rank.returncode is not None for rank in self.ranks):
            return
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
        """Ends the warm process. From here on, or from the next start(), process ids of ranks may be used again."""
        self._requests.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._process.kill()
        self._process.wait()
        self._forget_run()

    def _forget_run(self) -> None:
        if self._reports >= 0:
            os.close(self._reports)
        self._reports, self._unread = -1, b""


@dataclass
class SpawnedRank:
    """The part of subprocess.Popen that the launcher uses, for a process that is not its child."""

    spawner: Spawner
    pid: int
    """Process id of the rank; until it has started, that of the warm process."""
    stdout: TextIO
    returncode: int | None = None
    has_started: bool = False

    def poll(self) -> int | None:
        """Returns the exit status, or minus the signal's number; None while the rank runs."""
        if self.returncode is None:
            self.spawner.read_reports()
        return self.returncode

    def wait(self) -> int:
        """Waits for the rank to end. Returns the exit status."""
        while (status := self.poll()) is None:
            time.sleep(_POLL_S)
        return status


def _block_interrupts() -> None:
    """Blocks interrupts until _end_by_interrupts(), because a starting interpreter would print a traceback."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def _end_by_interrupts() -> None:
    """Makes interrupts end the process without a traceback, which would only show which import Ctrl-C came in."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def run_target(target: str) -> NoReturn:
    """Runs module:function as this process's program. An int that it returns is the exit status."""
    _end_by_interrupts()
    sys.argv = [target]
    module, function = target.split(":")
    _run_and_exit(getattr(importlib.import_module(module), function))


def main(target: str) -> None:
    """Runs the warm process. target: module:function."""
    _end_by_interrupts()
    requests = socket.socket(fileno=0)
    lines = requests.makefile("rb")
    function: Callable[[], Any] | None = None
    while request := _receive(requests):
        store, reports, *outputs = request
        os.environ.clear()
        os.environ.update(json.loads(lines.readline()))
        function = function or _import(target, reports, outputs[0])
        pids = _fork_ranks(target, function, store, reports, outputs)
        _connect(Path(os.devnull), 1, 2)
        for descriptor in (store, *outputs):
            os.close(descriptor)
        _report_ends(reports, pids)
        os.close(reports)
        select.select([requests], [], [])  # keeps the last ranks' ids taken: the launcher may signal them
        for pid in pids:
            os.waitpid(pid, 0)
    os._exit(0)  # tearing down torch would cost CPU time, here and in each rank


def _receive(requests: socket.socket) -> list[int]:
    """Returns the descriptors of the next run: store, reports and the ranks' outputs; empty after the last run."""
    _, descriptors, flags, _ = socket.recv_fds(requests, 1, _MOST_RANKS + 2)
    if flags & socket.MSG_CTRUNC:  # this process may have no more open files
        if len(descriptors) > 1:
            _report(descriptors[1], error=f"OSError: {os.strerror(errno.EMFILE)}")
        os._exit(1)
    return descriptors


def _import(target: str, reports: int, output: int) -> Callable[[], Any]:
    os.dup2(output, 1)
    os.dup2(output, 2)
    module, name = target.split(":")
    gc.disable()  # collecting during an import costs time and frees little
    try:
        function: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except Exception as error:
        _report(reports, error=" ".join(f"{type(error).__name__}: {error}".split())[:500])
        if isinstance(error, ImportError | MemoryError | OSError):  # says by itself what is missing
            os._exit(1)
        raise
    gc.freeze()  # ranks share these pages as long as none writes to them
    gc.enable()
    sys.stdout.flush()
    sys.stderr.flush()
    return function


def _fork_ranks(target: str, function: Callable[[], Any], store: int, reports: int, outputs: list[int]) -> list[int]:
    is_warm = len(os.listdir("/proc/self/task")) == 1
    if not is_warm:
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: this one only calls exec
    spawner, pids = os.getpid(), []
    for rank in range(len(outputs)):
        pids.append(os.fork())
        if pids[-1] == 0:
            _become_rank(rank, spawner, store, reports, outputs)
            if is_warm:
                sys.argv = [target]
                _run_and_exit(function)
            words, env = python_call(run_target, target, env=os.environ, target=target.partition(":")[0])
            _block_interrupts()
            os.execve(words[0], words, env)
    return pids


def _become_rank(rank: int, spawner: int, store: int, reports: int, outputs: list[int]) -> None:
    """Gives the fork a separate session, environment and output. Reports to the launcher when it can be signalled."""
    die_with(spawner)  # first: it must not get a session of its own and then outlive the spawner
    os.setsid()
    _connect(Path(os.devnull), 0)
    os.dup2(outputs[rank], 1)
    os.dup2(outputs[rank], 2)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    if rank == 0:
        os.set_inheritable(store, True)
        os.environ.update(give_socket(store))
    else:
        os.close(store)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all forks would draw the same numbers
    _report(reports, rank=rank, pid=os.getpid())
    for descriptor in (reports, *outputs):
        os.close(descriptor)


def _report_ends(reports: int, pids: list[int]) -> None:
    """Reports the end of each rank. Returns when all have ended; they stay zombies."""
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
    """Runs the function and exits as the interpreter does, but without tearing down imported modules."""
    status, is_interrupted = 1, False
    try:
        num_residents = int(os.environ.get(NUM_RESIDENTS, "0"))
        # What the function wants from its first moment on: Ctrl-C may come before it can say so.
        of_function = getattr(function, "at_interrupt", signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler if num_residents else of_function)
        if num_residents:
            # Here: numpy, which it imports, starts threads, and only a process of one thread may be forked.
            from tracekern.launcher.resident import run_residents

            status = run_residents(num_residents, function)
        else:
            status = exit_status(function)
    except KeyboardInterrupt as error:
        is_interrupted = True
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
    """Writes one line of JSON, shorter than PIPE_BUF, so that lines of several ranks do not mix."""
    os.write(descriptor, json.dumps(what).encode() + b"\n")


def _connect(path: Path, *descriptors: int) -> None:
    source = os.open(path, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(source, descriptor)
    os.close(source)
