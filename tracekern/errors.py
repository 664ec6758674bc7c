"""Errors a user can act on. The command line prints the text alone and exits with `exit_code`."""

from __future__ import annotations

import contextlib
import errno
import signal
import traceback
from collections.abc import Iterator
from typing import Any

_RESOURCES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)
_PHRASES = ("t allocate memory", "new thread", "Too many open files", "Cannot allocate memory", "No space left")
"""Texts of torch's and Python's errors for the same, which have no number."""


class TracekernError(Exception):
    """Base of all errors that a user can act on. Its text is one line: what is wrong, and what to do.

    `exit_code` is what the command line ends with.
    """

    exit_code = 2


class BadInput(TracekernError):
    """A file, an argument or the environment cannot be used as it is."""


class NotBuilt(BadInput, ImportError):
    """A part that has to be compiled is missing."""


def one_line(error: BaseException) -> str:
    """Returns the first line of an error's text, with the error's type where it is none of ours."""
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, TracekernError) else f"{type(error).__name__}: {text}".removesuffix(": ")


_EXTRAS = {
    "torch": "tracekern[run]",
    **dict.fromkeys(("typer", "rich"), "tracekern[run] or tracekern[read]"),
    **dict.fromkeys(("pyarrow", "plotly", "junitparser", "tomli"), "tracekern[read]"),
}
"""The packages that only some parts need, and what installs them."""


def missing_package(what: str, package: str) -> BadInput:
    """The error for something that needs a package which is not installed."""
    how = f"install {_EXTRAS[package]}, or `python -m pip install {package}`"
    return BadInput(f"{what} needs {package}, which is not installed here; {how}")


def is_of_signal(error: BaseException) -> bool:
    """Returns whether a handler of a signal raised it, as a program's watchdog does: then it is the program's own."""
    handlers = list(map(signal.getsignal, signal.valid_signals()))
    functions = [*handlers, *(type(handler).__call__ for handler in handlers if callable(handler))]
    codes = {getattr(getattr(function, "__func__", function), "__code__", None) for function in functions} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


@contextlib.contextmanager
def packages_for(what: str) -> Iterator[None]:
    """Raises missing_package() where the block imports a package that only some parts need, and that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise missing_package(what, package) from None


class CommTimeout(TracekernError, TimeoutError):
    """A kernel waited longer for a peer than its time limit allows.

    `fault` holds kernel, rank, block, warp, peer, channel, slot, wanted_epoch, seen_epoch, seen_value, waited_ns,
    cause, aborted_by and on_timeout. It is empty where no kernel wrote them down.
    """

    exit_code = 3

    def __init__(self, text: str, fault: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.fault = fault or {}


class PeerLost(TracekernError):
    """A rank cannot exchange messages with the others, because one has ended or is late."""


class CallBroken(TracekernError):
    """A call ended between its kernels. The communicator cannot be used until all ranks have called `reset()`."""


class DeviceLost(TracekernError):
    """This process cannot use its device any more: a kernel trapped or accessed invalid memory."""

    exit_code = 3


def what_is_lacking(error: BaseException) -> str:
    """Returns one line for an error that says that memory, disk, threads or open files have run out; else ""."""
    text = str(error).strip().partition("\n")[0][:200] or "out of memory"
    is_resource = isinstance(error, OSError) and error.errno in _RESOURCES
    if not is_resource and not isinstance(error, MemoryError) and not any(phrase in text for phrase in _PHRASES):
        return ""
    return f"{text}; raise the limit (`ulimit -a`), or ask for less"
