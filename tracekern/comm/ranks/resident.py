"""Resident ranks: threads of one process that share its GPU, on which all their kernels have room side by side.

They pass messages in memory. A kernel of one waits for kernels of the others, so one thread launches the first kernel
of a call for all ranks, then the second for all: whichever launch the driver or the device holds back, everything that
it could wait for is on its way. A gate holds the streams until all of a call has been launched, or the rank that is
launched first would always wait for the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tracekern.comm.devices.this_thread import being
from tracekern.comm.ranks.group import Group, message_timeout_s, name_and_value
from tracekern.errors import PeerLost
from tracekern.formatting import ranks as name_ranks
from tracekern.garbage import without_collector

MAX_RESIDENTS = 32
"""Most resident ranks: each has a stream of its own, and torch has 32 of them."""
LATE_S = 5.0
"""How long kernels of a call are held back for a rank that has not come to it. Then they start, and wait for it as they
would on GPUs of their own. Earlier a rank that allocates memory could find the GPU full of kernels that wait for it."""


@dataclass
class _Meeting:
    """One group of the ranks: what each has said in this turn."""

    members: tuple[int, ...]
    said: dict[int, Any] = field(default_factory=dict)
    heard: list[Any] = field(default_factory=list)
    turn: int = 0
    is_broken: bool = False


@dataclass
class _Turns:
    """What the same ranks launch together, and how often they have."""

    members: tuple[int, ...]
    calls: dict[int, _Call] = field(default_factory=dict)
    turn: int = 0
    turn_of: Counter[int] = field(default_factory=Counter)

    def is_complete(self, gone: set[int]) -> bool:
        return self.calls.keys() | gone >= {*self.members}


@dataclass
class _Call:
    """Kernels of one rank that are to be launched. run(first, last): launches those in between."""

    stream: int
    num_kernels: int
    run: Callable[[int, int], None]
    error: Exception | None = None
    is_launched: bool = False


class Gate(Protocol):
    """Holds streams back until it opens (csrc/platform/gpu_host.hpp)."""

    def hold(self, stream: int) -> None: ...
    def open(self) -> None: ...


def _gate_of_gpu() -> Gate:
    from tracekern import _cuda

    gate: Gate = _cuda.StreamGate()
    return gate


class Residents:
    """The ranks of one process."""

    def __init__(self, num_ranks: int, make_gate: Callable[[], Gate] | None = None) -> None:
        """make_gate: None: that of a GPU."""
        self.num_ranks = num_ranks
        self._changed = threading.Condition()
        self._gone = set[int]()
        self._interrupted = set[int]()
        self._meetings: dict[tuple[int, ...], list[_Meeting]] = {}
        self._num_groups = Counter[tuple[int, tuple[int, ...]]]()
        self._turns: dict[tuple[int, ...], _Turns] = {}
        self._make_gate = make_gate or _gate_of_gpu
        self._gate: Gate | None = None

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Makes this thread a rank inside the block. The others do not wait for it any more when the block ends."""
        try:
            with being(self, rank):
                yield
        finally:
            with self._changed:
                self._gone.add(rank)
                self._changed.notify_all()

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt on every rank: where it waits for the others, or would."""
        with self._changed:
            self._interrupted |= set(range(self.num_ranks)) - self._gone
            self._changed.notify_all()

    def open_group(self, rank: int, members: Sequence[int] | None = None) -> ResidentGroup:
        """Returns the rank's end of a new group of these ranks, or of all. The n-th of each is that of the others."""
        ranks = tuple(range(self.num_ranks) if members is None else members)
        with self._changed:
            number, meetings = self._num_groups[rank, ranks], self._meetings.setdefault(ranks, [])
            self._num_groups[rank, ranks] += 1
            if number == len(meetings):
                meetings.append(_Meeting(ranks))
            turns = self._turns.setdefault(ranks, _Turns(ranks))
            return ResidentGroup(self, rank, meetings[number], turns)

    def exchange(self, meeting: _Meeting, rank: int, value: Any, timeout_s: float) -> list[Any]:
        """Returns the values of all ranks of the group, in their order. Raises PeerLost."""
        with self._changed:
            turn = meeting.turn
            meeting.said[rank] = value
            if len(meeting.said) == len(meeting.members) and not meeting.is_broken:
                meeting.heard = [meeting.said[peer] for peer in meeting.members]
                meeting.said = {}
                meeting.turn += 1
                self._changed.notify_all()
                return meeting.heard
            try:
                lacks = self._gone.intersection(meeting.members).difference
                self._wait(rank, lambda: meeting.turn != turn or meeting.is_broken or lacks(meeting.said), timeout_s)
            except KeyboardInterrupt:
                meeting.said.pop(rank, None)
                raise
            if meeting.turn != turn:
                return meeting.heard
            meeting.is_broken = True
            self._changed.notify_all()
            raise PeerLost(f"rank {rank}: the other ranks do not answer ({self._who_lacks(meeting)})")

    def _who_lacks(self, meeting: _Meeting) -> str:
        late = sorted({*meeting.members} - meeting.said.keys())
        ended = [peer for peer in late if peer in self._gone]
        if ended:
            return f"{name_ranks(ended)} ended"
        return f"{name_ranks(late)} came too late" if late else "one was too late before"

    def launch(self, turns: _Turns, rank: int, call: _Call, late_s: float) -> None:
        """Launches the call together with those that the group's other ranks bring. Raises what its own launches raise.

        late_s: how long to wait for them. Who comes later is launched at once.
        """
        with self._changed:
            turns.calls[rank] = call
            turns.turn_of[rank] += 1
            is_late = turns.turn_of[rank] <= turns.turn
            try:
                if not is_late:
                    self._wait(rank, lambda: call.is_launched or turns.is_complete(self._gone), late_s)
                if not call.is_launched:
                    self._launch_all(turns, {rank: call} if is_late else dict(turns.calls))
            finally:
                turns.calls.pop(rank, None)
        if call.error is not None:
            raise call.error

    def align_launches(self, turns: _Turns, rank: int) -> None:
        """Makes the rank's next call one of the turn that is to come, whatever it has missed or done alone."""
        with self._changed:
            turns.turn_of[rank] = turns.turn

    def _launch_all(self, turns: _Turns, calls: dict[int, _Call]) -> None:
        turns.turn = max(turns.turn, *(turns.turn_of[rank] for rank in calls))
        try:
            # Freeing a buffer's memory would wait for all streams, in the thread that is to launch what they wait for.
            with without_collector(), self._held([call.stream for call in calls.values()]):
                for kernel in range(max(call.num_kernels for call in calls.values())):
                    for call in calls.values():
                        if kernel < call.num_kernels and call.error is None:
                            _launch_one(call, kernel)
        except RuntimeError as error:  # a device that is lost holds no stream
            for call in calls.values():
                call.error = call.error or error
        for rank, call in calls.items():
            call.is_launched = True
            turns.calls.pop(rank, None)
        self._changed.notify_all()

    @contextlib.contextmanager
    def _held(self, streams: list[int]) -> Iterator[None]:
        if len(streams) == 1:
            yield
            return
        gate = self._gate = self._gate or self._make_gate()
        try:
            for stream in streams:
                gate.hold(stream)
            yield
        finally:
            gate.open()

    def _wait(self, rank: int, is_over: Callable[[], object], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_over():
            if rank in self._interrupted:
                self._interrupted.discard(rank)
                raise KeyboardInterrupt
            if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                return


def _launch_one(call: _Call, kernel: int) -> None:
    try:
        call.run(kernel, kernel + 1)
    except Exception as error:  # noqa: BLE001 - raised again in the rank whose launch it is
        call.error = error


class ResidentGroup(Group):
    """A rank's end of a group of resident ranks."""

    def __init__(self, residents: Residents, rank: int, meeting: _Meeting, turns: _Turns) -> None:
        """rank: of the run."""
        super().__init__(meeting.members.index(rank), len(meeting.members))
        if self.num_ranks < residents.num_ranks:
            self._global_ranks, self.num_world_ranks = list(meeting.members), residents.num_ranks
        self.num_residents = residents.num_ranks
        self._residents, self._meeting, self._turns = residents, meeting, turns

    @property
    def is_connected(self) -> bool:
        return True

    def _exchange(self, message: bytes) -> list[tuple[str, Any]]:
        return [name_and_value(theirs) for theirs in self.share(message)]

    def share(self, value: Any) -> list[Any]:
        """Returns the objects of all ranks themselves, [num_ranks]. Collective."""
        return self._residents.exchange(self._meeting, self.world_rank, value, message_timeout_s())

    def barrier(self, timeout_s: float | None = None) -> None:
        self._residents.exchange(self._meeting, self.world_rank, None, timeout_s or message_timeout_s())

    def launch(self, stream: int, num_kernels: int, run: Callable[[int, int], None], timeout_s: float) -> None:
        self._residents.launch(self._turns, self.world_rank, _Call(stream, num_kernels, run), min(LATE_S, timeout_s))

    def align_launches(self) -> None:
        self._residents.align_launches(self._turns, self.world_rank)
