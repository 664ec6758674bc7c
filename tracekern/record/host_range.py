"""Spans of host threads, from anywhere in a program."""

from __future__ import annotations

import contextlib
from types import TracebackType

from tracekern.record.session import open_capture


class range(contextlib.ContextDecorator):  # noqa: A001, N801 - `with tracekern.range("step"):`
    """Records a span of this host thread: `with tracekern.range("step"):`, or `@tracekern.range("step")` on a function.

    It shows what the host did. Kernels that the host only queued meanwhile may run later. Does nothing where no capture
    is open.

    Args:
        name: What the span is called.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._span: contextlib.AbstractContextManager[None] | None = None

    def _recreate_cm(self) -> range:
        """Gives each call of a decorated function a separate span, also when calls nest."""
        return range(self._name)

    def __enter__(self) -> None:
        capture = open_capture()
        if capture is not None:
            self._span = capture.range(self._name)
            self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(kind, error, traceback)
