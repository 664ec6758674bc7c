"""Errors a user can act on. The command line prints the text alone and exits with `exit_code`."""

from __future__ import annotations

from typing import Any


class TracekernError(Exception):
    """What is wrong, which thing, what was got and wanted, what to do: one line."""

    exit_code = 2


class BadInput(TracekernError):
    """A dump, trace, argument or environment that cannot be used as it is."""


class NotBuilt(BadInput, ImportError):
    """A part that has to be compiled is missing."""


def missing_package(what: str, package: str) -> BadInput:
    """The error for something that needs a package which is not installed."""
    return BadInput(f"{what} needs {package}, which is not installed here; run `pip install {package}`")


class CommTimeout(TracekernError, TimeoutError):
    """A kernel waited longer than its limit for a peer."""

    exit_code = 3

    def __init__(self, text: str, fault: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.fault = fault or {}
        """kernel, rank, block, warp, peer, channel, slot, wanted_epoch, seen_epoch, seen_value, waited_ns, cause,
        aborted_by (a rank), on_timeout; empty where no kernel wrote them down."""


class CallBroken(TracekernError):
    """A call of several kernels that ended before the last of them: the communicator is out of use until reset()."""


class DeviceLost(TracekernError):
    """A device that this process cannot use any more: a kernel trapped or touched what it must not."""

    exit_code = 3
