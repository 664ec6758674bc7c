"""tracekern's launcher: one process per rank on this host.

No rank outlives the launcher. After the first rank fails, the others are stopped in time. Then the launcher salvages
what dead ranks left in shared memory and removes the segments. Ranks find each other as under torchrun: RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; TRACEKERN_RUN_ID names the run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracekern.errors import BadInput
from tracekern.launcher.spawner import SpawnedRank, Spawner, die_with
from tracekern.segment.salvage import salvage_run

OnLine = Callable[[int, str], None]
OnStart = Callable[[int, int], None]

_POLL_S = 0.02
_TERM_GRACE_S = 5.0


@dataclass(frozen=True)
class RankExit:
    """How one rank ended."""

    rank: int
    pid: int
    returncode: int
    """Exit status; minus the signal's number where a signal ended it."""
    stopped: bool
    """The launcher ended it: it had not followed a failed rank in time, or the run took too long."""
    salvaged: bool
    """It never closed its capture; what it had recorded was saved for it."""

    @property
    def signal_name(self) -> str:
        """The signal that ended the rank, "" for none."""
        return signal.Signals(-self.returncode).name if self.returncode < 0 else ""


def launch_ranks(
    num_ranks: int,
    target: Sequence[str] | str | Spawner,
    *,
    env: Mapping[str, str] | None = None,
    capture_dir: Path | str | None = None,
    timeout_s: float | None = None,
    on_line: OnLine | None = None,
    on_start: OnStart | None = None,
    kill_after_s: float = 30.0,
) -> list[RankExit]:
    """Runs a command or a function as `num_ranks` processes of this host and waits for all of them.

    Captures of ranks that die are salvaged. Ctrl-C is passed on to all ranks.

    Args:
        num_ranks: Number of processes.
        target: The words of a command, or "module:function". The module of a function is imported once, in a process
            that all ranks are forked from, with OMP_NUM_THREADS=1 unless that is set; a module that starts threads is
            imported by each rank. An int that the function returns is the exit status. A Spawner serves several runs.
        env: Environment variables of the ranks, in addition to those of this process.
        capture_dir: Where salvaged dumps go. None: into the directory of the capture.
        timeout_s: Time limit of the whole run in seconds.
        on_line: Called with (rank, line) for each line that a rank prints. None: lines are printed with the rank in
            front. An exception that it raises ends the run and is raised here.
        on_start: Called with (rank, pid) when a rank has started.
        kill_after_s: How long the other ranks may run after one has failed.

    Returns:
        How each rank ended, [num_ranks].

    Raises:
        BadInput: The target cannot be started.
    """
    if num_ranks < 1:
        raise BadInput(f"{num_ranks} ranks: wanted at least 1")
    if not target:
        raise BadInput(f"target {target!r}: wanted module:function, or a list of words for a command")
    run_id = f"{os.getpid()}-{secrets.token_hex(4)}"
    env = {**os.environ, **(env or {})}
    run = _Run(env, run_id, on_line or _print_line, on_start)
    try:
        with contextlib.ExitStack() as stack:
            if isinstance(target, str):
                target = stack.enter_context(Spawner(target, env))
            stack.callback(run.stop)
            run.start(num_ranks, target)
            run.wait(timeout_s, kill_after_s)
    finally:
        salvaged = salvage_run(run_id, Path(capture_dir) if capture_dir else None)
    if isinstance(target, Spawner) and target.error:
        raise BadInput(f"target {target.target!r}: cannot be imported ({target.error}); check module and function")
    if run.problem is not None:
        raise run.problem
    return [
        RankExit(rank, process.pid, process.wait(), rank in run.stopped, rank in salvaged)
        for rank, process in enumerate(run.processes)
    ]


@dataclass
class _Run:
    env: dict[str, str]
    run_id: str
    on_line: OnLine
    on_start: OnStart | None
    processes: list[subprocess.Popen[str] | SpawnedRank] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)
    started: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    problem: Exception | None = None
    """First exception that on_line raised."""

    def start(self, num_ranks: int, target: Sequence[str] | Spawner) -> None:
        shared = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "TRACEKERN_RUN_ID": self.run_id,
            "TRACEKERN_KEEP_SEGMENT": "1",
            "PYTHONUNBUFFERED": "1",
        }
        env = {**self.env, **shared}
        if isinstance(target, Spawner):
            target.start(num_ranks, env)
            self.processes.extend(target.ranks)
        else:
            for rank in range(num_ranks):
                self.processes.append(_start_command(target, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}))

    def _start_readers(self) -> None:
        for rank, process in enumerate(self.processes):
            self.readers.append(threading.Thread(target=self._read, args=(rank, process), daemon=True))
            self.readers[-1].start()

    def wait(self, timeout_s: float | None, kill_after_s: float) -> None:
        """Returns when all ranks have ended, or when the time of the remaining ranks is up."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        interrupts: list[int] = []
        with _on_signal(signal.SIGINT, lambda number, frame: interrupts.append(number)):
            self._start_readers()  # here: Ctrl-C may follow the first line of a rank
            while self.running() and time.monotonic() < deadline and self.problem is None:
                self._tell_started()
                time.sleep(_POLL_S)
                if interrupts:
                    interrupts.clear()
                    self._signal(signal.SIGINT)
                    deadline = min(deadline, time.monotonic() + kill_after_s)
                if any(process.returncode for process in self.processes):
                    deadline = min(deadline, time.monotonic() + kill_after_s)
        self._tell_started()

    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def stop(self) -> None:
        """Ends the remaining ranks, with SIGTERM first. A second Ctrl-C must not leave ranks behind."""
        with _on_signal(signal.SIGINT, signal.SIG_IGN):
            self.stopped.update(self.running())
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + _TERM_GRACE_S
            while self.running() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._signal(signal.SIGKILL)
            for process in self.processes:
                process.wait()
            deadline = time.monotonic() + _TERM_GRACE_S
            for reader in self.readers:
                reader.join(max(0.0, deadline - time.monotonic()))

    def _tell_started(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.started and (not isinstance(process, SpawnedRank) or process.has_started):
                self.started.add(rank)
                if self.on_start is not None:
                    self.on_start(rank, process.pid)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.processes[rank].pid, number)

    def _read(self, rank: int, process: subprocess.Popen[str] | SpawnedRank) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                self.on_line(rank, line.rstrip("\n"))
            except Exception as error:  # noqa: BLE001 - raised again after the run; until then ranks need a reader
                self.problem = self.problem or error


@contextlib.contextmanager
def _on_signal(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Installs another signal handler inside the block. Only the main thread can do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _start_command(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[str]:
    parent = os.getpid()
    try:
        return subprocess.Popen(
            list(command),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # the terminal's Ctrl-C reaches ranks once, through the launcher
            preexec_fn=lambda: die_with(parent),
        )
    except OSError as error:
        raise BadInput(f"{command[0]}: cannot be started ({error.strerror}); check the command") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _print_line(rank: int, line: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"  # may lack characters of the line
    sys.stdout.write(f"[rank {rank}] {line}\n".encode(encoding, "replace").decode(encoding))
