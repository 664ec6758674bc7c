"""What calls with DeepEP's names and arguments share: their events, checks, and limits of a single call."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tracekern.comm.communicator import check_timeout
from tracekern.errors import BadInput
from tracekern.formatting import shown
from tracekern.moe.calls.launches import check_capture

if TYPE_CHECKING:
    import torch

Limits = tuple[float, str]
"""timeout_s and on_timeout, see Communicator.set_timeout()."""

ALIGNMENT = 16
"""Tensors begin at multiples of it: kernels move 16 bytes at a time."""


class EventHandle:
    """What the current stream has come to when it is made. Without CUDA there is none: calls are over on return."""

    def __init__(self) -> None:
        import torch

        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def current_stream_wait(self) -> None:
        """Lets what is launched on the current stream from now on begin behind it."""
        import torch

        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """The end of a call on a stream of its own, async_finish=True. At the end of a `with` the current stream waits.

    event: None for a call on the current stream, for which there is nothing to wait. extra_tensors: kept as long.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Lets what is launched on the current stream from now on begin behind the call."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *raised: object) -> None:
        self.current_stream_wait()


class OwnStream:
    """The stream of calls with async_finish=True. On the CPU there is none: a call is over when it returns."""

    def __init__(self, backend: str) -> None:
        self._is_cpu = backend == "cpu"
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def of_call(
        self,
        async_finish: bool,
        previous_event: EventOverlap | None = None,
        used: Iterable[torch.Tensor | None] = (),
    ) -> Iterator[tuple[EventOverlap, list[torch.Tensor | None]]]:
        """Launches what is launched inside behind the current stream and the event: there, or on a stream of its own.

        used: tensors from before. Yields the end of the call, and a list for the tensors that are made inside.
        """
        made: list[torch.Tensor | None] = []
        overlap = EventOverlap()
        if self._is_cpu or not async_finish:
            if previous_event is not None:
                previous_event.current_stream_wait()
            yield overlap, made
            return
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        outer = torch.cuda.current_stream()
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            if previous_event is not None:
                previous_event.current_stream_wait()
            yield overlap, made
            overlap.event = EventHandle()
        # The memory of none is given away before both streams have come so far.
        for stream, tensors in ((self._stream, used), (outer, made)):
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(stream)


def check_events(previous_event: Any, async_finish: Any, allocate_on_comm_stream: Any) -> None:
    """Raises BadInput for what are no event and no flags. Memory is the same whichever stream it is allocated on."""
    if previous_event is not None and not isinstance(previous_event, EventOverlap):
        raise BadInput(f"previous_event is {type(previous_event).__name__}; wanted an EventOverlap, of capture() say")
    check_flag("async_finish", async_finish)
    check_flag("allocate_on_comm_stream", allocate_on_comm_stream)


def refuse_later(**arguments: object) -> None:
    """Raises BadInput for DeepEP's arguments that are not implemented yet."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise BadInput(f"{name} is not supported yet; leave it out")


_meaningless: set[str] = set()
"""Arguments that were said to have no meaning here."""


def say_meaningless(given: dict[str, bool]) -> None:
    """Warns of arguments of DeepEP's hardware that were given, each once a process."""
    names = [name for name, is_given in given.items() if is_given and name not in _meaningless]
    if names:
        _meaningless.update(names)
        text = f"{', '.join(names)}: no meaning here, where ranks write to each other's memory; accepted"
        warnings.warn(text, stacklevel=2)


def check_flag(name: str, value: Any) -> None:
    """Raises BadInput unless `value` is True or False."""
    if not isinstance(value, bool):
        raise BadInput(f"{name} is {shown(value)}; wanted True or False")


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Raises BadInput for memory that kernels cannot move 16 bytes at a time."""
    if tensor.data_ptr() % ALIGNMENT:
        raise BadInput(f"{name} begins at an address that {ALIGNMENT} bytes do not divide; clone() it")


def check_start(usual: Limits, capture: Any, timeout_s: Any, on_timeout: Any, after_stage: Any = None) -> Limits:
    """Checks a call's capture, limits and after_stage. Returns the limits; None stands for the usual one."""
    check_capture(capture, after_stage)
    limits = (usual[0] if timeout_s is None else timeout_s, usual[1] if on_timeout is None else on_timeout)
    check_timeout(*limits)
    return limits


def address(tensor: torch.Tensor | None) -> int:
    """Returns where a tensor begins, for a native call; 0 for none."""
    return 0 if tensor is None else int(tensor.data_ptr())
