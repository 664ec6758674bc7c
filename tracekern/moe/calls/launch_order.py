"""Launches of buffers of one communicator on any stream: one after the other, each with its own time limit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tracekern import _core
from tracekern.comm.communicator import Communicator
from tracekern.comm.ranks.group import Group
from tracekern.moe.calls.deepep import Limits


class LaunchOrder:
    """The launches on this rank of one buffer, or of several that share a communicator."""

    def __init__(self, comm: Communicator, limits: Limits) -> None:
        """limits: of launches that have none of their own."""
        self._comm, self._limits = comm, limits
        self._last_launch: tuple[int, Any, bool] | None = None
        """Stream, event behind it, and whether they belong to a captured graph."""

    @contextlib.contextmanager
    def limited(self, limits: Limits | None) -> Iterator[None]:
        """Sets the time limit of the kernels that are launched inside."""
        if limits is None or limits == self._limits:
            yield
            return
        self._comm.set_timeout(*limits)
        try:
            yield
        finally:
            self._comm.set_timeout(*self._limits)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Lets what is launched inside begin after all that was launched before, whatever the stream.

        Inside a graph only launches of the same capture are ordered: a replay is ordered by the stream it runs on.
        """
        if self._comm.device.backend == "cpu":
            yield
            return
        import torch

        stream, is_captured = torch.cuda.current_stream(), self._comm.device.streams.is_captured()
        if self._last_launch is not None:
            handle, event, was_captured = self._last_launch
            if handle != stream.cuda_stream and was_captured == is_captured:
                stream.wait_event(event)
        yield
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        self._last_launch = stream.cuda_stream, event, is_captured


@dataclass(frozen=True)
class HeapPart:
    """The part of a communicator's heap that a buffer's kernels use, and with whose launches theirs are in order."""

    comm: Communicator
    order: LaunchOrder
    first_byte: int

    @classmethod
    def of_new(
        cls, group: Group, num_bytes: int, backend: str, limits: Limits, hosts: Sequence[int] | None = None
    ) -> HeapPart:
        """Makes a communicator with `num_bytes` for kernels on each rank, its own ones included. Collective."""
        timeout_s, on_timeout = limits
        comm = Communicator(group, num_bytes, timeout_s, backend, on_timeout, reserved_bytes=num_bytes, hosts=hosts)
        return cls(comm, LaunchOrder(comm, limits), _core.heap_control_bytes)
