"""How transfers end: what tells whoever submitted one, and the error that says what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from tracekern.errors import BadInput, TracekernError
from tracekern.fabric.library import native

Outcome = Literal["failed", "stalled", "cancelled"]


class TransferError(TracekernError):
    """A transfer or message that did not arrive, or of which that is not known."""

    def __init__(self, message: str, outcome: Outcome = "failed") -> None:
        """outcome:

        - "failed": an error came back, or nothing was sent. Its source can be used again.
        - "stalled": nothing came back in time. It may still arrive, and its source may still be read.
        - "cancelled": not all of it was sent, and what was sent has ended.
        """
        super().__init__(message)
        self.outcome = outcome


def to_error(result: Any) -> TransferError | None:
    """Returns what a compiled Result says went wrong."""
    return None if result.outcome == "done" else TransferError(result.why, result.outcome)


def _wait(wait: Callable[..., bool], *arguments: float) -> bool:
    try:
        return wait(*arguments)
    except ValueError as error:  # in a child that was forked
        raise BadInput(str(error)) from None


class DoneFlag:
    """Is set once, when one transfer has ended. The engine sets it without the interpreter's lock."""

    def __init__(self) -> None:
        self.native = native().DoneFlag()

    @property
    def is_done(self) -> bool:
        return bool(self.native.is_done)

    @property
    def error(self) -> TransferError | None:
        """What went wrong; None until it is done, and if all went well."""
        return to_error(self.native.result)

    def wait(self, timeout_s: float) -> None:
        """Waits for the end. Raises TransferError for a transfer that failed, or has not ended in time."""
        if not _wait(self.native.wait, timeout_s):
            raise TransferError(f"the transfer has not ended within {timeout_s:g} s")
        if self.error:
            raise self.error


class DoneCounter:
    """Counts the transfers that it was given to and that have ended. The engine adds without the interpreter's lock."""

    def __init__(self) -> None:
        self.native = native().DoneCounter()

    @property
    def done(self) -> int:
        """Transfers that arrived."""
        return int(self.native.done)

    @property
    def errors(self) -> int:
        """Transfers that failed."""
        return int(self.native.errors)

    def wait(self, count: int, timeout_s: float) -> None:
        """Waits until `count` have ended since it was made. Raises TransferError when one failed, or time is up."""
        if not _wait(self.native.wait, count, timeout_s):
            ended = self.done + self.errors
            raise TransferError(f"{ended} of {count} transfers have ended within {timeout_s:g} s")
        first = to_error(self.native.first_error)
        if first:
            failed = f"{self.errors} of {self.done + self.errors} transfers failed"
            raise TransferError(f"{failed}; the first: {first}", first.outcome)


OnDone = Callable[[TransferError | None], None] | DoneFlag | DoneCounter
"""Told once, when the bytes are in the peer's memory or will not be. A function is called on the engine's callback
thread, with None or the error."""


def native_on_done(on_done: OnDone) -> Any:
    """Returns what the compiled part takes. Raises BadInput for what cannot be told."""
    if isinstance(on_done, (DoneFlag, DoneCounter)):
        return on_done.native
    if not callable(on_done):
        raise BadInput(f"on_done is {on_done!r}; wanted a function, a DoneFlag or a DoneCounter")
    call = on_done
    return lambda result: call(to_error(result))
