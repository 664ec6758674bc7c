"""Starts a process, within a time limit, that dies with the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tracekern.errors import BadInput
from tracekern.launcher.watch import children, is_stopped

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIMIT_S = 10.0


def start_process(
    words: Sequence[str], env: Mapping[str, str], prepare: Callable[[], object] = lambda: None, **more: Any
) -> subprocess.Popen[Any]:
    """Starts a command in a session of its own: the terminal's Ctrl-C reaches it through this process only.

    prepare: runs in the child. more: further arguments of subprocess.Popen. Raises OSError if it cannot be started,
    BadInput if it is stopped before it runs.
    """
    parent = os.getpid()

    def prepare_child() -> None:
        die_with(parent)
        prepare()

    with _ending_the_stopped() as ended:
        process = subprocess.Popen(list(words), env=env, start_new_session=True, preexec_fn=prepare_child, **more)
    if ended:
        process.wait()
        raise BadInput(f"process {process.pid} did not start within {_LIMIT_S:.0f} s: it was stopped; run it again")
    return process


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies. Runs in the child; the parent may be dead already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _ending_the_stopped() -> Iterator[list[int]]:
    """Kills children that are stopped before they run their program: subprocess would wait for them for ever.

    Yields the list of their process ids.
    """
    thread, ended = threading.get_native_id(), list[int]()
    before = children(os.getpid(), thread)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_LIMIT_S):
            for pid in children(os.getpid(), thread) - before:
                if is_stopped(pid):
                    ended.append(pid)
                    os.kill(pid, signal.SIGKILL)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield ended
    finally:
        is_over.set()
        watching.join()
