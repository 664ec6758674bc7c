"""Findings about a capture that is not to be in memory: window by window, in a folder of files.

The folder is that of the capture, of what is asked of it and of this version. Where the command was killed, the next
one that asks the same goes on with what is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tracekern import __version__
from tracekern.analysis.findings import Findings
from tracekern.analysis.kept_parts import KeptParts, Workers
from tracekern.analysis.part import Part
from tracekern.analysis.questions.balance import LinkLimit
from tracekern.analysis.scratch import scratch_of
from tracekern.dump.reader import peek_metadata
from tracekern.errors import BadInput
from tracekern.formatting import count, duration, size
from tracekern.machine import free_memory, usable_cores
from tracekern.timeline.load import find_dumps
from tracekern.timeline.model import Timeline
from tracekern.timeline.select import Window
from tracekern.timeline.windowed import WindowedRun, load_windows

_BYTES_A_SPAN, _BYTES_OF_A_PROCESS = 300, 250_000_000
"""What a report takes of memory for each span, and each process before it has any."""
_LEAST_SPANS = 10_000
"""Of a window."""
_DISK_A_SPAN, _NS_A_SPAN = 300, 8_000


@dataclass(frozen=True)
class Cost:
    """What a report of a capture takes."""

    num_spans: int
    memory: int
    """Bytes that it may use."""
    num_processes: int

    @classmethod
    def of(cls, captures: Sequence[Path], memory: int | None) -> Cost:
        """memory: None for three quarters of what is free. Raises BadInput where it is too little for any window."""
        metadata = (peek_metadata(path) for path in find_dumps(captures))
        num_spans = sum(launch["records_count"] for about in metadata for launch in about["launches"])
        memory = free_memory()[0] * 3 // 4 if memory is None else memory
        if memory < (least := _BYTES_OF_A_PROCESS + _LEAST_SPANS * _BYTES_A_SPAN):
            raise BadInput(f"{size(memory)} of memory are too little for any window; wanted {size(least)} or more")
        return cls(num_spans, memory, min(usable_cores(), max(1, memory // (2 * _BYTES_OF_A_PROCESS))))

    @property
    def fits(self) -> bool:
        """Whether all of it can be in memory."""
        return _BYTES_OF_A_PROCESS + self.num_spans * _BYTES_A_SPAN <= self.memory

    @property
    def spans_of_window(self) -> int:
        return (self.memory // self.num_processes - _BYTES_OF_A_PROCESS) // _BYTES_A_SPAN

    def describe(self) -> str:
        """Says what windows take."""
        windows = -(-self.num_spans // self.spans_of_window)
        return (
            f"{count(self.num_spans, 'span')} do not fit into {size(self.memory)}; {count(windows, 'window')} or more, "
            f"{self.num_processes} at a time, take about {duration(self.num_spans * _NS_A_SPAN)} of CPU time and "
            f"{size(self.num_spans * _DISK_A_SPAN)} of {tempfile.gettempdir()}"
        )


@contextlib.contextmanager
def findings_in_windows(
    captures: Sequence[Path],
    cost: Cost,
    tell: Callable[[int, int, str], None],
    choose_window: Callable[[Timeline], Window | None],
    link_limit: LinkLimit | None,
    how: Mapping[str, Any],
) -> Iterator[Findings]:
    """Yields what analyze() returns.

    tell: takes how much is done of how much, and of what. choose_window: tells by the tables, and the lanes, what is to
    be judged. how: options of load().
    """
    about = *map(_identity, find_dumps(captures)), cost.spans_of_window, sorted(how.items()), __version__
    with _folder_of(about) as folder, Workers(cost.num_processes, tell) as workers:
        scratch = scratch_of(folder)
        if not scratch.has("run"):
            for begun in folder.glob("windows_*"):
                shutil.rmtree(begun)
            loaded = load_windows(captures, folder, cost.spans_of_window, **how)
            tables = loaded.skeleton
            for table in (tables.ranks, tables.tracks, tables.events, tables.launches, tables.problems):
                scratch.share(table)
            scratch.save("run", scratch.share(loaded))
        run: WindowedRun = scratch.load("run")
        window = choose_window(run.skeleton)
        parts = KeptParts.make(scratch, workers, partial(_part_of, run, window), 1 + len(run.windows))
        yield Findings(run.skeleton, link_limit, window, parts)


def _part_of(run: WindowedRun, window: Window | None, number: int) -> Part:
    launches = run.windows[number - 1] if number else np.zeros(len(run.skeleton.launches), bool)
    part = Part(run.part(number), window, launches)
    part.every_wait  # noqa: B018 - kept with it
    return part


def _identity(path: Path) -> tuple[str, int, int]:
    about = path.stat()
    return str(path.resolve()), about.st_size, about.st_mtime_ns


@contextlib.contextmanager
def _folder_of(about: object) -> Iterator[Path]:
    """Yields the folder of what is asked, and removes it at the end; a process that is killed leaves it."""
    import fcntl  # which not all systems have

    name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"tracekern-windows-{os.geteuid()}-{name}"
    try:
        folder.mkdir(0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{folder} is not ours")
        lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be used ({error}); set TMPDIR to a folder with room for windows") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"{folder}: another process works on the same capture; wait for it, or stop it") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
