"""A range of a host thread, as a capture records it."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Protocol


class RangeRecorder(Protocol):
    """The part of a capture that its ranges use."""

    is_in_short_way: bool

    def may_record_range(self, name: str) -> bool:
        """Returns whether a range that begins now is recorded."""

    def end_range(self, name: str, begin_ns: int) -> None:
        """Records one that began at a time of CLOCK_MONOTONIC and ends now."""


class HostSpan(contextlib.ContextDecorator):
    """`with capture.range("step"):`, or `@capture.range("step")` on a function. Not entered twice at a time."""

    __slots__ = ("_begin_ns", "_capture", "_name")

    def __init__(self, capture: RangeRecorder, name: str) -> None:
        self._capture, self._name, self._begin_ns = capture, name, 0

    def _recreate_cm(self) -> HostSpan:
        """Gives each call of a decorated function a separate span, also when calls nest."""
        return HostSpan(self._capture, self._name)

    def __enter__(self) -> None:
        capture, name = self._capture, self._name
        is_plain = type(name) is str and name.isascii() and capture.is_in_short_way
        if is_plain or capture.may_record_range(name):
            self._begin_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        begin_ns, self._begin_ns = self._begin_ns, 0  # the next time, it may not be recorded
        if begin_ns:
            self._capture.end_range(self._name, begin_ns)
