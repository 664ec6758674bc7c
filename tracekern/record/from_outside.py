"""Captures that are asked for from outside the code that launches: `tracekern.launch()` is all that a library calls.

TRACEKERN_CAPTURE=DIR asks for one, and so does `start()`. It opens at the next launch, in the thread that launches, and
ends by `stop()`, after a number of launches, or at exit. Whatever fails is a line in the log.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tracekern.comm.devices.this_thread import this_resident
from tracekern.comm.ranks.group import losing_peers, ranks_in
from tracekern.comm.ranks.launcher_environment import rank_and_size
from tracekern.comm.ranks.meeting import id_of, meet
from tracekern.environment import positive_number
from tracekern.errors import BadInput, one_line
from tracekern.record.guard import Guard
from tracekern.record.joint_start import JointStart
from tracekern.record.launches import LaunchHandle
from tracekern.record.session import Capture, capture, open_capture

_OPENING_S = 20.0
"""How long a rank waits at its first launch for the other ranks to come to theirs."""
_CLOSING_S = 10.0
"""How long it waits at the end for theirs. It may be the end of a rank that failed, which the launcher must see."""
_NEXT_LAUNCH_S = 1.0
"""How long stop() leaves it to the thread that launches to close the capture."""
_OPTIONS = "TRACEKERN_CAPTURE_OPTIONS"

_log = logging.getLogger("tracekern")
_Result = TypeVar("_Result")
_directory = os.environ.get("TRACEKERN_CAPTURE", "")
_windows: dict[Any, _Window] = {}
"""What was asked for last, in this process or by each resident rank in it."""
_last_launch = -1, ""
"""Number and key of the last launch that this process has asked for, captured or not."""
_num_joint = Counter[str]()
"""Captures that ranks have opened together after start(), by JointStart.who."""


def launch(
    name: str,
    *,
    grid: int,
    warps: int,
    stream: int = 0,
    events: str | dict[str, Any],
    roles: Sequence[str] = (),
    epoch: int = 0,
    ahead: bool = False,
    key: str = "",
) -> LaunchHandle:
    """Calls `Capture.launch()` of the capture that is open, whoever opened it.

    Without one the descriptor is 0 and the untraced body runs. Where TRACEKERN_CAPTURE names a directory, or after
    `start()`, a capture opens first; all ranks open it together. Arguments: see `Capture.launch()`.

    Raises:
        BadInput: An argument cannot be used, in a capture of the program with on_error="raise".
    """
    global _last_launch
    session, number = open_capture(), _last_launch[0] + 1
    _last_launch = number, key
    if not (_windows or _directory):  # the usual cases come first: what a library pays whom nobody traces, then others
        if session is None:
            return LaunchHandle(0, grid, warps, stream)
        return session.launch(
            name,
            grid=grid,
            warps=warps,
            stream=stream,
            events=events,
            roles=roles,
            epoch=epoch,
            ahead=ahead,
            key=key,
        )
    given: dict[str, Any] = {"grid": grid, "warps": warps, "stream": stream, "events": events}
    given |= {"roles": roles, "epoch": epoch, "ahead": ahead, "key": key}
    window = _windows.get(this_resident()) or _window_of_environment()
    if window is not None and (session is None or session is window.session):
        handle = window.launch(name, given, number)
    else:
        handle = None if session is None else session.launch(name, **given)
    return handle or LaunchHandle(0, grid, warps, stream)


def start(path: str | Path, *, launches: int | None = None, **options: Any) -> Path | None:
    """Asks for a capture that opens at the next `tracekern.launch()`. In any thread; never raises for what it is given.

    All ranks call it, or those of `group` alone, each when it hears of it: the capture opens at a launch that all of
    them have before them then, and none waits for another. What an earlier start() or TRACEKERN_CAPTURE began is ended.

    Args:
        path: The directory, another one for each capture: it replaces an earlier capture there.
        launches: How many launches each rank records. None: all until stop(), or the end of the process.
        options: Arguments of `tracekern.capture()`; on_error is "warn".

    Returns:
        The directory; None, and a line in the log, if an argument cannot be used or the program's own capture is open.
    """
    guard = Guard(str(path), "warn", then="; nothing is recorded")
    with guard:
        if launches is not None and (not isinstance(launches, int) or launches < 1):
            raise BadInput(f"start(launches={launches!r}): wanted 1 or more")
        directory = _make(path, options).directory
        if _has_process_group() and this_resident() is None:
            _ranks_of(options)
        if (earlier := _windows.get(this_resident())) is not None:
            earlier.stop()
        if (other := open_capture()) is not None:
            raise BadInput(f"a capture into {other.directory} is open; close it first")
        _windows.pop(this_resident(), None)
        _ask_for(_Window(directory, options, launches)).tell_others()
    return None if guard.is_off else directory


def stop() -> Path | None:
    """Ends what start() or TRACEKERN_CAPTURE began, and saves it. In any thread; never raises.

    The thread that launches closes the capture at its next launch; if none comes within a second, this thread does, but
    for a signal's handler that has interrupted a launch. It waits for kernels that run, and for the other ranks, which
    call it too, as long as a capture that closes.

    Returns:
        The directory of the capture; None, and a line in the log, if there is none.
    """
    window = _windows.get(this_resident())
    directory = None if window is None else window.stop()
    if not _directory and (window is None or window.is_over):  # else the next launch would open that again
        _windows.pop(this_resident(), None)
    if directory is None and not (window and window.was_left):
        _log.warning("tracekern.stop(): no capture was open; one opens at the first tracekern.launch() after start()")
    return directory


class _Window:
    """One capture that was asked for: wanted at first, then open, then over."""

    def __init__(self, path: Path, options: dict[str, Any] | None, launches: int | None = None) -> None:
        """options: arguments of capture(); None: those of the environment."""
        self.session: Capture | None = None
        self._path, self._options, self._left = path, options, launches
        self._lock = threading.RLock()
        self._is_wanted, self._is_open, self._is_ending = True, False, False
        self._is_over = threading.Event()
        self._launcher, self._launching = 0, 0
        """Threads: who opened the capture, and who is in launch()."""
        self._launched: Counter[str] = Counter()
        self._every = 1
        self._last: dict[int, int] = {}
        """Thread -> the descriptor of its last launch, whose kernel it may be about to start."""
        self._directory: Path | None = None
        self._joint: JointStart | None = None
        self.was_left = False
        """Whether start() was taken back, which is logged, before all ranks could open the capture."""
        self._why_not_yet = ""

    def launch(self, name: str, given: dict[str, Any], number: int) -> LaunchHandle | None:
        """Returns the launch; None where this capture does not record it."""
        if self._is_over.is_set() or (self._is_ending and threading.get_ident() != self._launcher):
            return None
        with self._lock:
            self._launching = threading.get_ident()
            try:
                return self._launch(name, given, number)
            finally:
                self._launching = 0

    def _launch(self, name: str, given: dict[str, Any], number: int) -> LaunchHandle | None:
        if self._is_wanted:
            self._open_if_possible(name, number, given["key"])
        is_last = self._is_ending or self._left == 0
        if is_last and not _is_captured():
            self._last.pop(threading.get_ident(), None)  # started before this one is asked for
            self.end()
        if is_last or self.session is None or not self._is_open:
            return None
        self._count(name)
        handle = self.session.launch(name, **given)
        self._last[threading.get_ident()] = handle.descriptor
        return handle

    def _count(self, name: str) -> None:
        """Counts a launch that the capture records, or has no room for: on all ranks the same."""
        is_selected = self._launched[name] % self._every == 0
        self._launched[name] += 1
        if self._left is not None and is_selected:
            self._left -= 1

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def stop(self) -> Path | None:
        """Ends the capture. Returns its directory, the first time."""
        self._is_ending = True
        if self._launching == threading.get_ident() and self.session is not None:
            return self.session.directory  # in a signal's handler: the next launch closes it, or the process's end
        if self._is_open and self._launcher != threading.get_ident():
            self._is_over.wait(_NEXT_LAUNCH_S)
        self.end()
        directory, self._directory = self._directory, None
        return directory

    def end(self, error: BaseException | None = None) -> None:
        """Closes the capture if it is open, and opens none any more. error: what the program ends with."""
        with self._lock:
            is_open, self._is_wanted, self._is_open = self._is_open, False, False
            if self._joint is not None:
                self._leave(self._joint)
            if is_open and self.session is not None:
                self.session.handed_out = [descriptor for descriptor in self._last.values() if descriptor]
                self.session.__exit__(type(error) if error else None, error, None)
                self._directory = self.session.directory
            self._is_over.set()

    def end_at_exit(self) -> None:
        if self._is_wanted and self._why_not_yet and self._joint is None:
            _log.warning("capture %s: nothing was recorded: %s", self._path, self._why_not_yet)
        # A rank that failed waits for none of the others.
        self.end(sys.exc_info()[1] or getattr(sys, "last_value", None))

    def is_left_to_fork(self) -> bool:
        """Forgets the capture in a fork of its rank. Returns whether the fork may open it: the rank has not."""
        self._lock = threading.RLock()  # another thread may have held it
        may_open, self._is_wanted, self._is_open, self.session = self._is_wanted, False, False, None
        self._is_over.set()
        return may_open

    def _open_if_possible(self, name: str, number: int, key: str) -> None:
        if _is_captured():
            why = f"launch {name}: in a CUDA graph that capture.graph() did not make; it runs unrecorded"
            if why != self._why_not_yet:
                _log.warning("%s", why)
        elif not (why := _why_ranks_cannot_meet()) and self._is_due(number, key):
            self._open()
        self._why_not_yet = why

    def tell_others(self) -> None:
        """Tells the other ranks of torch.distributed, if it is there by now, that this one has called start()."""
        with self._lock:
            if self._joint is None and this_resident() is None and _has_process_group():
                self._joint = self._if_store_works(self._join)

    def _join(self) -> JointStart | None:
        import torch.distributed as dist

        ranks = _ranks_of(self._options or {})
        return JointStart(dist.get_rank(), ranks, _num_joint[id_of(ranks)], *_last_launch) if len(ranks) > 1 else None

    def _is_due(self, number: int, key: str) -> bool:
        """Returns whether the capture opens at this launch. One of TRACEKERN_CAPTURE does at the first of each rank."""
        if self._options is None:
            return True
        self.tell_others()
        if (joint := self._joint) is None:
            return self._is_wanted
        if not self._if_store_works(lambda: joint.is_due(number, key)):
            return False
        self._joint = None
        _num_joint[joint.who] += 1
        return True

    def _leave(self, joint: JointStart) -> None:
        """Takes start() back before its capture has opened."""
        self.was_left = True
        _log.warning("capture %s: nothing was recorded: %s", self._path, self._if_store_works(joint.why_not_yet))
        self._if_store_works(joint.withdraw)
        self._joint = None

    def _if_store_works(self, call: Callable[[], _Result]) -> _Result | None:
        try:
            return call()
        except (BadInput, RuntimeError, TypeError, ValueError) as error:  # the last two where the backend has no store
            _log.warning("capture %s: nothing is recorded: %s", self._path, one_line(error))
            self._is_wanted, self._joint = False, None
            return None

    def _open(self) -> None:
        self._is_wanted, self._launcher = False, threading.get_ident()
        guard = Guard(str(self._path), "warn")
        with guard:
            options = _options_of_environment() if self._options is None else self._options
            _make(self._path, options)
            _meet(options)
            self.session = _make(self._path, options, on_error="warn")
            self._every = int(options.get("every", 1))
            self.session.on_rival, self.session.peers_limit_s = self._give_way, _CLOSING_S
            self.session.__enter__()
            self._is_open = open_capture() is self.session
        if not self._is_open:
            self._is_over.set()

    def _give_way(self, rival: Path) -> None:
        _log.warning("capture %s: closed, as the program opens its own into %s", self._path, rival)
        self.end()


def _window_of_environment() -> _Window | None:
    """Returns what TRACEKERN_CAPTURE asks for; None without it."""
    if not _directory:
        return None
    path = Path(_directory)
    with suppress(OSError):  # the working directory is gone, which the capture will say
        path = path.absolute()
    return _ask_for(_Window(path, None))


def _ask_for(window: _Window) -> _Window:
    atexit.unregister(_end_all)
    atexit.register(_end_all)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:  # it may end without what atexit has
        from multiprocessing.util import Finalize

        Finalize(None, _end_all, exitpriority=0)
    return _windows.setdefault(this_resident(), window)


def _end_all() -> None:
    for window in list(_windows.values()):
        window.end_at_exit()


def _forget_in_fork() -> None:
    for key, window in list(_windows.items()):
        if window.is_left_to_fork():
            del _windows[key]


os.register_at_fork(after_in_child=_forget_in_fork)


def _make(path: str | Path, options: dict[str, Any], **more: Any) -> Capture:
    """Returns the capture, not yet opened. Raises BadInput for arguments that cannot be used."""
    try:
        return capture(path, **{**options, **more})
    except TypeError as error:
        raise BadInput(f"{error}; wanted arguments of tracekern.capture()") from None


def _options_of_environment() -> dict[str, Any]:
    text = os.environ.get(_OPTIONS, "{}")
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise BadInput(f'{_OPTIONS}={text}: wanted arguments of tracekern.capture() as JSON, such as {{"every": 10}}')
    return options


def _why_ranks_cannot_meet() -> str:
    """Returns why the ranks that the environment tells of cannot open a capture yet; "" if they can."""
    if this_resident() is None and not _has_process_group():
        with suppress(BadInput):  # which the capture will raise, too
            rank, num_ranks = rank_and_size()
            if num_ranks > 1:
                return f"rank {rank} of {num_ranks} had not initialised torch.distributed at its last launch"
    return ""


def _ranks_of(options: dict[str, Any]) -> Sequence[int]:
    """Returns the ranks of torch.distributed that capture. Raises BadInput where this one is none of them."""
    import torch.distributed as dist

    group = options.get("group")
    return range(dist.get_world_size()) if group is None else ranks_in(group)


def _meet(options: dict[str, Any]) -> None:
    """Waits for all ranks that capture, but not as long as for a message. Raises PeerLost if one does not come."""
    if this_resident() is None and _has_process_group():
        import torch.distributed as dist

        rank = dist.get_rank()
        with losing_peers(rank):
            meet(rank, _ranks_of(options), positive_number("TRACEKERN_GROUP_TIMEOUT_S", _OPENING_S))


def _has_process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    is_initialized = getattr(dist, "is_initialized", None)  # not there while it is imported, or left out
    return is_initialized is not None and is_initialized()


def _is_captured() -> bool:
    """Returns whether torch's current stream is being captured, when nothing may wait for the device."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # not there while torch is imported
    return cuda is not None and cuda.is_initialized() and cuda.is_current_stream_capturing()
