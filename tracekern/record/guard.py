"""What a capture does about its own failures: raises them, or warns once and lets the run go on untraced."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from tracekern.errors import BadInput, is_of_signal, one_line

OnError = Literal["raise", "warn"]

_log = logging.getLogger("tracekern")


def nothing() -> None:
    """What a guard calls that has no capture."""


class Guard:
    """Wraps what can fail in one capture: `with guard:`.

    With on_error="warn" an error ends there: the first is logged, and from then on the capture is off. What of_user()
    marks, what a handler of a signal raises, KeyboardInterrupt and SystemExit always pass.
    """

    def __init__(
        self, where: str, on_error: OnError, then: str = "; nothing more is recorded, the run goes on"
    ) -> None:
        """where: names the capture in messages. then: ends the warning. Raises BadInput for an unknown `on_error`."""
        if on_error not in ("raise", "warn"):
            raise BadInput(f"on_error={on_error!r}: wanted 'raise' or 'warn'")
        self._where, self._then = where, then
        self._warns = on_error == "warn"
        self._lock = threading.Lock()
        self._problem = ""
        self._users_error: BaseException | None = None
        self.on_off: Callable[[], None] = nothing
        """Called when something has failed for the first time, so that nothing more is recorded."""

    @property
    def warns(self) -> bool:
        """Whether errors are lines of the log."""
        return self._warns

    @property
    def is_off(self) -> bool:
        """Whether something has failed, so that nothing more is recorded. Never with on_error="raise"."""
        return bool(self._problem)

    def raise_again(self) -> None:
        """Raises BadInput with what turned the capture off, if anything did."""
        if self._problem:
            raise BadInput(self._problem)

    def of_user(self, run: Callable[[], None]) -> Callable[[], None]:
        """Returns `run`, a function of the user, such that what it raises passes the guard."""

        def run_or_note() -> None:
            try:
                run()
            except BaseException as error:
                self._users_error = error
                raise

        return run_or_note

    def closing(self, users_error: BaseException | None) -> Guard:
        """Returns the guard of the capture's end. It never replaces the error that the user's block ended with."""
        return Guard(self._where, "warn" if self._warns or users_error is not None else "raise", then="")

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None and error is self._users_error:
            self._users_error = None  # its frames hold device memory, which a later graph's capture must not give back
            return False
        if not self._warns or not isinstance(error, Exception) or is_of_signal(error):
            return False
        with self._lock:  # the text alone: the error would keep alive what it passed, such as connections to peers
            is_first, self._problem = not self._problem, self._problem or one_line(error)
        if is_first:
            self.on_off()
            _log.warning("capture %s: %s%s", self._where, self._problem, self._then)
            _log.debug("capture %s: where it failed", self._where, exc_info=error)
        return True
