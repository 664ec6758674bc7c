"""tracekern's launcher: one process per rank on this host, or one for all where they are resident.

No rank outlives the launcher. After the first rank fails, or when none makes progress (launcher/watch.py), the others
are stopped in time. Then the launcher salvages what dead ranks left in shared memory and removes the segments. Ranks
find each other by join_ranks() (launcher/rendezvous.py), or as under torchrun: RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT; TRACEKERN_RUN_ID names the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracekern.environment import positive_number, warn_of_unread
from tracekern.errors import BadInput
from tracekern.formatting import signal_name
from tracekern.launcher.rendezvous import environment, free_port, give_socket, store_socket
from tracekern.launcher.spawner import NUM_RESIDENTS, SpawnedRank, Spawner
from tracekern.launcher.start import start_process
from tracekern.launcher.watch import PHASES, Limits, Watch, is_stopped
from tracekern.segment.evidence import keeping
from tracekern.segment.salvage import salvage_run, stamp_deaths

OnLine = Callable[[int, str], None]
OnStart = Callable[[int, int], None]

_POLL_S = 0.02
_TERM_GRACE_S = 5.0
_KILL_GRACE_S = 10.0
_WAKE_GRACE_S = 1.0
_SET_UP_GRACE_S = 3.0
"""Time to fail for the same reason. Ranks that wait for a failed one to join have no records to write yet."""
_GROUP_TIMEOUT = "TRACEKERN_GROUP_TIMEOUT_S"
_GROUP_GRACE_S = 30.0
"""How much longer than the launcher ranks wait for each other's messages: the launcher can tell who is late and why."""


@dataclass(frozen=True)
class RankExit:
    """How one rank ended."""

    rank: int
    pid: int
    returncode: int
    """Exit status; minus the signal's number where a signal ended it."""
    stopped: bool
    """The launcher ended it: it had not followed a failed rank in time, or the run took too long or hung."""
    salvaged: bool
    """It never closed its capture; what it had recorded was saved for it."""
    phase: str = ""
    """The phase that it was in, if it told the launcher."""
    late: str = ""
    """Why the launcher ended the run because of this rank, in one line; "" if it did not."""

    @property
    def signal_name(self) -> str:
        """The signal that ended the rank, "" for none; "signal 40" for one without a name."""
        return signal_name(self.returncode)


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
    limits: Limits | None = None,
    run_id: str = "",
    resident: bool = False,
) -> list[RankExit]:
    """Runs a command or a function as `num_ranks` processes of this host and waits for all of them.

    Captures of ranks that die are salvaged. Ctrl-C is passed on to all ranks.

    Args:
        num_ranks: Number of processes.
        target: The words of a command, or "module:function", from where this process or PYTHONPATH of `env` imports.
            Ranks are forked from a process that imports it once, with OMP_NUM_THREADS=1 unless that is set; each rank
            imports a module that starts threads. An int that is returned is the exit status. A Spawner serves several.
        env: Environment variables of the ranks, in addition to those of this process.
        capture_dir: Where salvaged dumps go. None: into the directory of the capture.
        timeout_s: Time limit of the whole run in seconds.
        on_line: Called with (rank, line) for each line that a rank prints. None: lines are printed with the rank in
            front. An exception that it raises ends the run and is raised here.
        on_start: Called with (rank, pid) when a rank has started.
        kill_after_s: How long the others may run after one has failed; at most 3 s until one has told that it runs.
        limits: The longest times without progress, if the target tells its phases. None: a function has 60 s to start.
        run_id: Name of the run; made up where empty.
        resident: The ranks of a function are threads of one process (comm/ranks/resident.py), and lines rank 0's.

    Returns:
        How each rank ended, [num_ranks].

    Raises:
        BadInput: The target cannot be started.
    """
    _check_target(num_ranks, target, resident)
    num_processes, num_residents = (1, num_ranks) if resident else (num_ranks, 0)
    watch = Watch(num_processes, limits or Limits(), limits is not None, num_residents)
    more = {**(env or {}), NUM_RESIDENTS: str(num_residents)}
    run = _Run(_environment(more, limits), run_id or new_run_id(), on_line or _print_line, on_start, watch)
    with keeping(run.run_id):
        try:
            target = run.carry_out(target, num_processes, timeout_s, kill_after_s)
        finally:
            salvaged = salvage_run(run.run_id, Path(capture_dir) if capture_dir else None, run.killed_by())
    if isinstance(target, Spawner) and target.error:
        raise BadInput(f"target {target.target!r}: cannot be imported ({target.error}); check module and function")
    if run.problem is not None:
        raise run.problem
    return run.ends(salvaged, num_ranks)


def _check_target(num_ranks: int, target: Sequence[str] | str | Spawner, resident: bool) -> None:
    if num_ranks < 1:
        raise BadInput(f"{num_ranks} ranks: wanted at least 1")
    if not target:
        raise BadInput(f"target {target!r}: wanted module:function, or a list of words for a command")
    if resident and not isinstance(target, str | Spawner):
        raise BadInput(f"target {list(target)}: resident ranks run a function, wanted module:function")


def new_run_id() -> str:
    """Returns a name for a run of this process."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def _environment(more: Mapping[str, str], limits: Limits | None) -> dict[str, str]:
    warn_of_unread()
    env = {**os.environ, **more}
    if limits is not None:
        env.setdefault(_GROUP_TIMEOUT, str(max(map(limits.of, PHASES)) + _GROUP_GRACE_S))
    positive_number(_GROUP_TIMEOUT, 60.0, env)  # here, where one line says it
    return env


@dataclass
class _Run:
    env: dict[str, str]
    run_id: str
    on_line: OnLine
    on_start: OnStart | None
    watch: Watch
    spawner: Spawner | None = None
    processes: list[subprocess.Popen[str] | SpawnedRank] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)
    started: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    late: dict[int, str] = field(default_factory=dict)
    """Why the launcher ended the run, by rank that was late."""
    problem: Exception | None = None
    """First exception that on_line raised."""
    ended_ns: dict[int, int] = field(default_factory=dict)
    """CLOCK_MONOTONIC when a process was first seen to have ended, by its number."""

    def start(self, num_ranks: int, target: Sequence[str] | Spawner) -> None:
        shared = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TRACEKERN_RUN_ID": self.run_id,
            "TRACEKERN_KEEP_SEGMENT": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with store_socket() as store:
            env = {**self.env, **shared, **environment(store, self.env)}
            if isinstance(target, Spawner):
                self.spawner = target
                target.start(num_ranks, env, store)
                self.processes.extend(target.ranks)
                return
            for rank in range(num_ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (give_socket(store.fileno()) if rank == 0 else {})
                self.processes.append(_start_command(target, {**env, **own}, [store.fileno()] if rank == 0 else []))

    def _start_readers(self) -> None:
        for rank, process in enumerate(self.processes):
            reader = threading.Thread(target=self._read, args=(rank, process), daemon=True)
            reader.start()
            self.readers.append(reader)

    def wait(self, timeout_s: float | None, kill_after_s: float) -> None:
        """Returns when all ranks have ended, or when the time of the remaining ranks is up."""
        end = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        failed_at, deadline, grace_s = float("inf"), end, kill_after_s
        interrupts: list[int] = []
        with _on_signal(signal.SIGINT, lambda number, frame: interrupts.append(number)):
            self._start_readers()  # here: Ctrl-C may follow the first line of a rank
            while self.running() and time.monotonic() < deadline and self.problem is None and not self.late:
                self._tell_started()
                time.sleep(_POLL_S)
                running = {rank: self.processes[rank].pid for rank in self.running()}
                self.late = self.watch.overdue(running, self.spawner.pid if self.spawner else 0)
                if interrupts:
                    interrupts.clear()
                    self._signal(signal.SIGINT)
                    failed_at = min(failed_at, time.monotonic())
                if any(process.returncode for process in self.processes):
                    failed_at = min(failed_at, time.monotonic())
                grace_s = min(kill_after_s, _SET_UP_GRACE_S) if self.watch.is_setting_up() else kill_after_s
                deadline = min(end, failed_at + grace_s)
        self._tell_started()
        if any(process.returncode for process in self.processes):
            self.late = {}  # those that run wait for the one that failed
        for rank in self.running():
            if is_stopped(self.processes[rank].pid):
                why = f"{self.watch.name([rank])} did not follow within {grace_s:.0f} s: it is stopped"
                self.late.setdefault(rank, why)

    def carry_out(
        self, target: Sequence[str] | str | Spawner, num_processes: int, timeout_s: float | None, kill_after_s: float
    ) -> Sequence[str] | Spawner:
        """Starts the ranks, and returns when all have ended. Returns what started them."""
        with contextlib.ExitStack() as stack:
            if isinstance(target, str):
                target = stack.enter_context(Spawner(target, self.env))
            stack.callback(self.stop)
            self.start(num_processes, target)
            self.wait(timeout_s, kill_after_s)
        return target

    def running(self) -> list[int]:
        running = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        for ended in set(range(len(self.processes))).difference(running, self.ended_ns):
            self.ended_ns[ended] = time.monotonic_ns()
        return running

    def stop(self) -> None:
        """Ends the remaining ranks, with SIGTERM first. A second Ctrl-C must not leave ranks behind."""
        with _on_signal(signal.SIGINT, signal.SIG_IGN):
            self._wake_spawner()
            self.stopped.update(self.running())
            self._signal(signal.SIGTERM)
            self._await_ends(_TERM_GRACE_S, but_stopped=True)
            self._signal(signal.SIGKILL)
            self._await_ends(_KILL_GRACE_S)
            self._give_up()
            self._stamp_deaths()
            deadline = time.monotonic() + _TERM_GRACE_S
            for reader in self.readers:
                reader.join(max(0.0, deadline - time.monotonic()))

    def _wake_spawner(self) -> None:
        """Lets a stopped spawner tell how the ranks ended, or kills it if it would start more of them."""
        if not (self.running() and self.spawner and is_stopped(self.spawner.pid)):
            return
        if len(self.started) < len(self.processes):
            self.stopped.update(self.running())
            self.spawner.kill()
        else:
            os.kill(self.spawner.pid, signal.SIGCONT)
            self._await_ends(_WAKE_GRACE_S)

    def _await_ends(self, limit_s: float, but_stopped: bool = False) -> None:
        """Waits until all ranks have ended; but_stopped: or are stopped."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(
            not (but_stopped and is_stopped(self.processes[rank].pid)) for rank in self.running()
        ):
            time.sleep(_POLL_S)

    def _give_up(self) -> None:
        """Counts ranks as killed that do not end: the process that would report it is stopped, or a driver hangs."""
        if self.running() and self.spawner:
            self.spawner.kill()
        for rank in self.running():
            why = f"{self.watch.name([rank])} does not end, although it was killed: it waits in the kernel"
            self.late.setdefault(rank, why)
            self.processes[rank].returncode = -signal.SIGKILL

    def _stamp_deaths(self) -> None:
        """Notes in the segments when their ranks ended: resident ranks, with their one process."""
        self.running()
        num_residents = int(self.env[NUM_RESIDENTS])
        stamp_deaths(self.run_id, dict.fromkeys(range(num_residents), self.ended_ns.get(0, 0)) or self.ended_ns)

    def killed_by(self) -> dict[int, str]:
        """Returns what killed ranks: the name of a signal, or "the launcher"."""
        found = {
            rank: "the launcher" if rank in self.stopped else signal_name(process.poll() or 0)
            for rank, process in enumerate(self.processes)
        }
        return dict.fromkeys(range(int(self.env[NUM_RESIDENTS])), found.get(0, "")) or found

    def ends(self, salvaged: Container[int], num_ranks: int) -> list[RankExit]:
        """Returns how each rank ended, [num_ranks]. salvaged: the ranks whose captures were saved for them.

        Resident ranks all end with their one process.
        """
        ends = [
            RankExit(
                rank,
                process.pid,
                process.wait(),
                rank in self.stopped,
                rank in salvaged,
                self.watch.phase(rank),
                self.late.get(rank, ""),
            )
            for rank, process in enumerate(self.processes)
        ]
        if len(ends) == num_ranks:
            return ends
        return [dataclasses.replace(ends[0], rank=rank, salvaged=rank in salvaged) for rank in range(num_ranks)]

    def _tell_started(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank not in self.started and (not isinstance(process, SpawnedRank) or process.has_started):
                self.started.add(rank)
                self.watch.started(rank)
                if self.on_start is not None:
                    self.on_start(rank, process.pid)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.processes[rank].pid, number)

    def _read(self, rank: int, process: subprocess.Popen[str] | SpawnedRank) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if self.watch.heard(rank, line.rstrip("\n")):
                continue
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


def _start_command(command: Sequence[str], env: dict[str, str], inherited: list[int]) -> subprocess.Popen[str]:
    try:
        return start_process(
            command,
            env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=inherited,
        )
    except OSError as error:
        raise BadInput(f"{command[0]}: cannot be started ({error.strerror}); check the command") from None


def _print_line(rank: int, line: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"  # may lack characters of the line
    sys.stdout.write(f"[rank {rank}] {line}\n".encode(encoding, "replace").decode(encoding))
