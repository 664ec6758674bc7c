"""What notify_dispatch tells this host: a second thread waits for it, while the kernel still runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from tracekern.comm.communicator import Communicator
from tracekern.comm.devices.this_thread import being, this_resident
from tracekern.errors import CommTimeout
from tracekern.formatting import duration

if TYPE_CHECKING:
    from tracekern.record.session import Capture

_LOOK_EVERY_US = 2000
"""How long the native wait goes on before this side looks whether the communicator has failed."""
_GRACE_S = 1.0
"""How much longer than the waits of the kernel the host waits: the kernel knows better what did not come."""
_WAITS = 2
"""Waits of notify_dispatch for other ranks that may each take the time limit."""


class Counts(NamedTuple):
    """What comes to this rank."""

    num_recv_tokens: int
    num_rdma_recv_tokens: int
    """Tokens that it forwards."""
    num_recv_tokens_per_expert: list[int]


class CountsPoll:
    """Waits for the counts of one notify, on a thread of its own: on the CPU backend a launch blocks its caller."""

    def __init__(self, comm: Communicator, wait_counts: Callable[[int, int], Any]) -> None:
        self._comm, self._wait_counts = comm, wait_counts
        self._pool = ThreadPoolExecutor(1, "poll_counts")

    @contextlib.contextmanager
    def started(
        self, ticket: int, timeout_s: float, capture: Capture | None, then: Callable[[Counts], Any]
    ) -> Iterator[Future[tuple[Counts, Any] | None]]:
        """Starts to wait for the counts of the notify with this ticket, which is to be launched inside the block.

        The result is the counts and what then(counts) makes of them on that thread; None where the communicator has
        failed, or the block was left by an exception before they came.
        """
        stop, has_begun, resident = threading.Event(), _passed(self._comm), this_resident()

        def run() -> tuple[Counts, Any] | None:
            with being(*resident) if resident is not None else contextlib.nullcontext():
                with host_span(capture, "poll_counts"):
                    counts = self._wait(ticket, timeout_s, has_begun, stop)
                return None if counts is None else (counts, then(counts))

        waiting = self._pool.submit(run)
        try:
            yield waiting
        except BaseException:
            stop.set()
            raise

    def _wait(
        self, ticket: int, timeout_s: float, has_begun: Callable[[], bool], stop: threading.Event
    ) -> Counts | None:
        begun_s = 0.0
        while (counts := self._wait_counts(ticket, _LOOK_EVERY_US)) is None:
            if stop.is_set() or not self._comm.is_usable:
                return None
            now_s = time.monotonic()
            begun_s = begun_s or (now_s if has_begun() else 0.0)
            if begun_s and now_s - begun_s > _WAITS * timeout_s + _GRACE_S:
                waited = duration(int((now_s - begun_s) * 1e9))
                raise CommTimeout(
                    f"rank {self._comm.group.world_rank} dispatch gave up on notify_dispatch after {waited}: the "
                    "kernel has told this host no counts"
                )
        return Counts(*counts)


def host_span(capture: Capture | None, name: str) -> contextlib.AbstractContextManager[Any]:
    """Records a span of this host thread if there is a capture."""
    return contextlib.nullcontext() if capture is None else capture.range(name)


def _passed(comm: Communicator) -> Callable[[], bool]:
    """Returns what tells whether the current stream has come so far."""
    if comm.device.backend == "cpu":
        return lambda: True
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query
