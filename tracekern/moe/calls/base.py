"""What DeepEP's Buffers share: how they begin and end, and how all ranks agree on a kind of call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tracekern import _core
from tracekern.comm.ranks.group import message_timeout_s
from tracekern.errors import BadInput
from tracekern.moe.calls.deepep import EventHandle, EventOverlap, OwnStream, check_start

if TYPE_CHECKING:
    from tracekern.comm.ranks.group import Group
    from tracekern.moe.calls.deepep import Limits
    from tracekern.moe.calls.launch_order import HeapPart


class BufferBase:
    """Buffers whose kernels are made in the first call, and again when a call has another layout."""

    def __init__(self, group: Group, heap: HeapPart, limits: Limits, executor: str, **names: Any) -> None:
        """names: of the kernels, see Communicator.add_kernels(). executor: of the CPU backend."""
        self.group, self.rank, self.group_size = group, group.rank, group.num_ranks
        self.comm, self._heap, self._limits = heap.comm, heap, limits
        self._first_stage = self.comm.add_kernels(**names, first_epoch=_core.first_epoch)
        self._executor = {"executor": executor} if self.comm.device.backend == "cpu" else {}
        self._own_stream = OwnStream(self.comm.device.backend)
        self._num_resets, self._is_destroyed = 0, False
        self.late_us = 0
        """How much later than its host this rank's next dispatches begin, to see how the others wait."""
        self.comm.on_reset(self._forget_calls)

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event behind what the current stream was given so far, to be another call's previous_event."""
        return EventOverlap(EventHandle())

    def reset(self) -> None:
        """Collective: makes the buffer usable again after a CommTimeout. Handles of before cannot be used."""
        self.comm.reset()

    def destroy(self) -> None:
        """Ends the use of the buffer, whatever state its communicator is in. Raises BadInput where calls are open."""
        with self.comm.one_thread("destroy"):
            if self.comm.is_usable and not self._is_destroyed:
                self._require_no_open_calls()
                self._is_destroyed = True
                self.comm.synchronize()
            self._is_destroyed = True

    def _require_no_open_calls(self) -> None:
        pass

    def _forget_calls(self) -> None:
        """The state before the first call. With all kernels finished."""
        self._num_resets += 1

    def _one_call(self, what: str) -> contextlib.AbstractContextManager[None]:
        if self._is_destroyed:
            raise BadInput("the buffer was destroyed; make another one")
        return self.comm.one_user_call(what)

    def _agree(self, what: str, settings: Callable[[], dict[str, Any]], timeout_s: Any, call: str) -> None:
        """All ranks check a kind of call that is new to them, within the call's limit. Collective."""
        try:
            limit_s = check_start(self._limits, None, timeout_s, None)[0]
        except BadInput:  # which settings() raises
            limit_s = self._limits[0]
        self.comm.agree(what, settings, limit_s, call)

    def _make_kernels(self, what: str, make: Callable[[], Any]) -> Any:
        """Returns the kernels of a new layout. Collective, behind an agreement on it."""
        made = []

        def settings() -> dict[str, Any]:
            made.append(make())
            return {}

        self.comm.agree(f"the set-up of {what}", settings, message_timeout_s())  # all have come: none is far behind
        return made[0]

    @contextlib.contextmanager
    def _told(self, call: str) -> Iterator[int]:
        """Tells the other ranks which call this one begins, and takes it back if none was launched. Yields its number
        since the last reset."""
        board, number = self.comm.board, self.comm.board.num_calls
        board.begin_call(number, call)
        try:
            yield number
        except BaseException:
            if self.comm.is_usable:  # nothing was launched
                board.take_back_call(number)
            raise
