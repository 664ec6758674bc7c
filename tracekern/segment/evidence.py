"""What dead ranks left in shared memory: saved where their next start captures, and else capped.

A process in a pod that starts again and again would otherwise fill /dev/shm with what each start left, and run untraced
from then on. A launcher, or `tracekern record`, saves what its own ranks leave: `keeping()` holds a lock that says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracekern.dump.attempts import is_attempt_of
from tracekern.formatting import ranks, size
from tracekern.segment.names import SHM_DIR, find_dead, list_segments
from tracekern.segment.salvage import Leftover, discard_run, find_leftovers, salvage_run

_log = logging.getLogger("tracekern")

MOST_RUNS = 8
"""Dead runs that may stay: the first one, which may tell the cause of all, and the newest."""
SHARE = 4
"""They take no more than one of so many parts of shared memory, but for the newest, which stays."""
_TURN_S = 10.0
"""How long a rank leaves it to others of its host to make room."""
_KEPT = ".kept"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def keeping(name: str) -> Iterator[None]:
    """Says while the block runs that this process saves what is left. name: of a run, or of a recording."""
    path = _marker(name)
    for other in SHM_DIR.glob(f"tracekern-*{_KEPT}"):
        _is_kept(other)  # else removes it
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(OSError):  # no room for a file, nor for a segment
            undo.callback(path.unlink, missing_ok=True)
            is_there = False
            while not is_there:  # who looks for it before it is locked takes it for a dead process's, and removes it
                file = undo.enter_context(open(os.open(path, _FLAGS, 0o600), "rb"))
                fcntl.flock(file, fcntl.LOCK_SH)
                is_there = path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
        yield


def make_way(directory: Path, command: str) -> None:
    """Saves what dead ranks left of captures into `directory`. What they left elsewhere, of the same command, and what
    cannot be saved is held to its limits. Logs what it does.

    Called by each rank before its capture opens. What still runs, what another process saves and what other commands
    and users left stays.
    """
    try:
        if find_dead():
            with _turn():
                _save_and_cap(directory, command)
    except OSError as error:  # the capture may open all the same
        _log.warning("what dead ranks left in shared memory stays there: %s", error)


def _save_and_cap(directory: Path, command: str) -> None:
    for run in _dead_runs(directory):
        run.save()
    for run in _too_many(_dead_runs(directory, command)):
        if not run.save():
            run.discard()


@dataclass(frozen=True)
class _DeadRun:
    run_id: str
    dead: list[int]
    num_bytes: int
    leftovers: list[Leftover]

    def save(self) -> bool:
        """Writes the dumps where the capture would have put them. Returns whether all could be written."""
        salvage_run(self.run_id)
        if is_saved := not list_segments(self.run_id):
            places = ", ".join(sorted({str(leftover.directory) for leftover in self.leftovers}))
            told = "what %s of run %s left in shared memory is saved in %s"
            _log.warning(told, ranks(self.dead), self.run_id, places or "no dump: nothing had been recorded")
        return is_saved

    def discard(self) -> None:
        discard_run(self.run_id)
        told = "what %s of run %s left in shared memory, %s, is removed: dead runs may take a quarter of %s, and be %d"
        _log.warning(told, ranks(self.dead), self.run_id, size(self.num_bytes), SHM_DIR, MOST_RUNS)


def _dead_runs(directory: Path, command: str = "") -> list[_DeadRun]:
    """Returns the runs into a directory, or of a command, of which only segments are left, oldest first.

    Without those that another process saves.
    """
    runs = []
    for run_id, dead in reversed(find_dead().items()):
        leftovers = [one for one in find_leftovers(run_id) if _is_into(directory, one) or command == one.command != ""]
        names = {
            run_id.partition(".")[0],
            *(leftover.recording for leftover in leftovers),
        }  # a launcher's, of all groups
        if leftovers and not any(map(_is_kept, map(_marker, names))):
            num_bytes = sum((SHM_DIR / name).stat().st_blocks * 512 for name in list_segments(run_id))
            runs.append(_DeadRun(run_id, dead, num_bytes, leftovers))
    return runs


def _is_into(directory: Path, leftover: Leftover) -> bool:
    own = Path(os.path.realpath(directory))
    return leftover.directory == own or is_attempt_of(own, leftover.directory)


def _too_many(runs: list[_DeadRun]) -> list[_DeadRun]:
    """Returns which of the runs are beyond the limits: those behind the first one, oldest first, then that."""
    found = os.statvfs(SHM_DIR)
    limit = found.f_blocks * found.f_frsize // SHARE
    stay, gone = list(runs), []
    while len(stay) > 1 and (len(stay) > MOST_RUNS or sum(run.num_bytes for run in stay) > limit):
        gone.append(stay.pop(1 if len(stay) > 2 else 0))
    return gone


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Takes turns with other ranks of this host and user; after a while the block runs beside them."""
    with open(os.open(SHM_DIR / f"tracekern.{os.geteuid()}.turn", _FLAGS, 0o600), "rb") as file:
        give_up = time.monotonic() + _TURN_S
        while time.monotonic() < give_up:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        yield


def _marker(name: str) -> Path:
    return SHM_DIR / f"tracekern-{name}{_KEPT}"


def _is_kept(marker: Path) -> bool:
    """Returns whether a process holds the marker. Removes one of a process that was killed."""
    with contextlib.suppress(OSError), open(marker, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        marker.unlink()
    return False
