"""A rank's end of a symmetric heap: its time limit, its faults, and how it recovers."""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tracekern.comm.devices.cpu import CpuDevice, clock_from_environment
from tracekern.comm.devices.device import CaptureDevice
from tracekern.comm.heap import SymmetricHeap
from tracekern.comm.network import Network, check_hosts
from tracekern.comm.ranks.agreement import MAX_TEXT, Check, Said
from tracekern.comm.ranks.board import Board, PassedBy
from tracekern.comm.ranks.group import Group, require_group
from tracekern.comm.symmetric_memory import MappedHeap, SymmetricAllocator, SymmetricTensor
from tracekern.dump.fault import describe_fault, parse_fault
from tracekern.dump.format import ALIGN, RANK_BARRIER
from tracekern.errors import BadInput, CallBroken, CommTimeout, DeviceLost
from tracekern.formatting import count, shown

if TYPE_CHECKING:
    import torch


LINK_GB_PER_S = (0.001, 1000.0)
"""Least and highest rate of a slow link."""
_NO_EVENTS = '{"name":"Align","events":[]}'


_made: weakref.WeakSet[Communicator] = weakref.WeakSet()


_num_made = Counter[tuple[int, tuple[int, ...]]]()
"""Communicators of a rank by their members, all as the run calls them. Members count alike: they make each together."""


def _members_of(group: Group) -> dict[str, Any] | None:
    """What event tables tell of a group's ranks; None for all ranks of the run."""
    if group.is_world:
        return None
    group.name = group.all_gather(group.name, "the name of a group")[0]  # that all ranks' tables are of one group
    made = group.world_rank, group.world_ranks
    _num_made[made] += 1
    generation = _num_made[made] - 1
    return {"name": group.name, "generation": generation, "ranks": list(group.world_ranks)}


def _refuse_in_child() -> None:
    for communicator in _made:
        communicator.refuse_in_child()


os.register_at_fork(after_in_child=_refuse_in_child)


class RecordedLaunch(Protocol):
    """What one kernel launch needs (tracekern.record.session.LaunchHandle)."""

    @property
    def descriptor(self) -> int:
        """Selects the kernel's body and the region it records to; 0: the untraced body."""


class LaunchRecorder(Protocol):
    """The part of a capture that a communicator uses."""

    def launch(
        self, name: str, *, grid: int, warps: int, stream: int = 0, events: str | dict[str, Any], epoch: int = 0
    ) -> RecordedLaunch:
        """Reserves the region of one launch."""


class Communicator:
    """A symmetric heap of all ranks, with flags, time limits and a barrier. Made by all ranks together.

    When a wait of a kernel exceeds the time limit, every use raises CommTimeout until all ranks have called `reset()`.

    Args:
        group: The ranks.
        num_bytes: Size of each rank's part of the heap, of which the communicator itself uses the first 4 KiB.
        timeout_s: Time limit of a kernel's waits, see `set_timeout()`.
        backend: "cpu" or "cuda".
        on_timeout: What happens after the limit, see `set_timeout()`.
        reserved_bytes: Bytes at the start of the heap, those 4 KiB included, that kernels address by offsets of their
            own. `malloc_symmetric()` hands out what lies behind them.
        hosts: Of each rank the number of its host. Ranks of a host map each other's parts; proxies reach others over a
            network, which kernels of your own cannot ask. None: all ranks are on one host. GPUs: resident ranks alone.

    Raises:
        BadInput: The backend is unknown, or the devices cannot share memory or have none left.
    """

    network: Network | None = None
    """To ranks of other hosts; None: there are none."""

    def __init__(
        self,
        group: Group,
        num_bytes: int,
        timeout_s: float,
        backend: str = "cpu",
        on_timeout: str = "raise",
        *,
        reserved_bytes: int = 0,
        hosts: Sequence[int] | None = None,
    ) -> None:
        from tracekern import _core

        require_group(group)
        if not group.is_connected:
            raise BadInput(
                f"{group.num_ranks} ranks that torch.distributed does not connect; call "
                "torch.distributed.init_process_group('gloo') before Group.discover()"
            )
        making = (num_bytes, timeout_s, backend, on_timeout, reserved_bytes)
        group.agree("Communicator()", lambda: _check_making(group.num_ranks, hosts, *making))
        self.group = group
        self.native: Any
        self.device: CaptureDevice
        """For tracekern.capture(..., device=...)."""
        self._users: list[dict[str, Any]] = []
        self._fault_names = {
            "rank_barrier": _core.rank_barrier_stage,
            "channels": list(_core.channels),
            "first_epoch": _core.first_epoch,
            "kernels": self._users,
        }
        self._failure: CommTimeout | CallBroken | DeviceLost | BadInput | None = None
        self._is_inherited = False
        self._on_reset: list[Callable[[], None]] = []
        owner = self._open(backend, num_bytes, timeout_s, check_hosts(hosts, group.num_ranks))
        self.device.fault_names = self._fault_names
        self._members, self._told = _members_of(group), dict[str, str]()
        if self._members:
            self._fault_names |= {"world_ranks": list(group.world_ranks), "communicator": group.name}
        self.set_timeout(timeout_s, on_timeout)
        heap = MappedHeap(
            group.rank,
            tuple(self.native.heap_addresses),
            num_bytes,
            self.device.torch_device,
            owner=owner,
        )
        self._symmetric = SymmetricAllocator(group, heap, max(reserved_bytes, _core.heap_control_bytes))
        self._barrier_events = _core.barrier_event_table()
        self.board = Board(group)
        self._in_call = threading.Lock()
        _made.add(self)
        group.barrier()

    def refuse_in_child(self) -> None:
        """Lets no call through in a process that this one has forked: the heap and the messages are its parent's."""
        self._is_inherited = True
        self._failure = BadInput(
            "the communicator was made before this process was forked, and cannot be used here; make one after the fork"
        )

    def _open(self, backend: str, num_bytes: int, timeout_s: float, hosts: Sequence[int] | None) -> Any:
        """Opens the device, and the network if there is one. Returns the owner of the mapped heap."""
        if backend == "cuda":
            from tracekern.comm.devices.cuda import open_cuda

            self.native, self.device = open_cuda(self.group, num_bytes, timeout_s, hosts)
        else:
            self._open_cpu(num_bytes, timeout_s, hosts)
        owner = self.native if backend == "cuda" else self._heap
        if hosts:
            self.network = Network(self.group, self.native, owner, 2 * num_bytes, hosts, backend)
        return owner

    def _open_cpu(self, num_bytes: int, timeout_s: float, hosts: Sequence[int] | None) -> None:
        from tracekern import _core

        self._heap = SymmetricHeap(self.group, num_bytes, hosts)
        seed, t0_ns = clock_from_environment()
        self.native = _core.CpuCommunicator(
            rank=self.group.rank,
            heaps=self._heap.addresses,
            timeout_ns=int(timeout_s * 1e9),
            clock_seed=seed,
            clock_t0_ns=t0_ns,
        )
        self.device = CpuDevice(self.native, self._heap, self.group.world_ranks, seed)

    def add_kernels(
        self,
        stages: Sequence[str],
        channels: Sequence[str] = (),
        slots: Mapping[str, str] | None = None,
        *,
        values: Mapping[str, str] | None = None,
        first_epoch: int | None = None,
        roles: Sequence[str] = (),
        rings: Sequence[str] = (),
        peers: int = 0,
        refusals: Sequence[str] = (),
    ) -> int:
        """Names kernels that use this communicator and the channels that they wait on, for the text of a CommTimeout.

        Args:
            stages: The kernels.
            channels: Numbered from kFirstOwnChannel on.
            slots: Channel -> what its slots are, where "slot" does not say it.
            values: Channel -> what the values of its flags count, such as "token"; "~token" where they are stored as
                their complement.
            first_epoch: The epoch of the first call, if each call has the epoch after that of the call before. The text
                then says "call 3" and not the epoch.
            roles: Of the warps that wait for a position in a ring, by RingWait::role.
            rings: By RingWait::ring.
            peers: Ranks of a node, where the text is to name the node of a rank.
            refusals: By the reason of refuse_call(), from 1 on: texts with places for the {rank} that refuses a call
                and a {number}, or the {peer} of that number. One user of the communicator has some.

        Returns:
            The number of the first stage, which is CommArgs::first_stage of these kernels.
        """
        entry: dict[str, Any] = {"stages": list(stages), "channels": list(channels)}
        names: dict[str, Any] = {"slots": slots and dict(slots), "values": values and dict(values)}
        names |= {"roles": list(roles), "rings": list(rings), "peers": peers, "refusals": list(refusals)}
        entry |= {key: given for key, given in names.items() if given}
        if first_epoch is not None:
            entry["first_epoch"] = first_epoch
        for known in self._users:
            if {**known, **entry} == known:
                return int(known["first_stage"])
        first_stage = sum(len(known["stages"]) for known in self._users)
        self._users.append({"first_stage": first_stage, **entry})
        return first_stage

    def malloc_symmetric(self, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """Allocates a tensor for kernels of your own in every rank's part of the heap, at the same offset on all ranks.

        All ranks call it together, with the same arguments in the same order. Offsets are multiples of 128 bytes. The
        tensor is zero at first; `reset()` does not clear it. Its memory is freed with the heap only. Nothing is started
        on the device, so that this also works after a CommTimeout.

        Args:
            shape: Sizes of the tensor, 0 included.
            dtype: Such as torch.bfloat16.

        Raises:
            BadInput: The ranks ask for different tensors, an argument is wrong, or too little of the heap is left.
                Raised on every rank; the next call may ask for another tensor.
            PeerLost: A peer has ended or is late.
        """
        self._require_own_process()
        return self._symmetric.malloc(shape, dtype)

    def _require_own_process(self) -> None:
        if self._is_inherited:
            raise BadInput(str(self._failure))

    def set_timeout(self, timeout_s: float, on_timeout: str = "raise") -> None:
        """Sets the time limit of waits in kernels that are launched from now on.

        Args:
            timeout_s: The longest wait in seconds.
            on_timeout: "raise": all warps leave their loops and the call raises CommTimeout; the communicator works
                again after `reset()`. "trap": the device stops at once, so that a debugger sees every warp; this
                process cannot use it any more. Either way the fault and a flight recorder's records are kept.

        Raises:
            BadInput: A value cannot be used.
        """
        check_timeout(timeout_s, on_timeout)
        self._timeout_s = timeout_s
        self.native.set_timeout(int(timeout_s * 1e9), on_timeout)

    def set_slow_link(self, gb_per_s: float, num_nodes: int) -> None:
        """Sets how fast rows leave this rank for ranks of other nodes, in kernels that are launched from now on.

        On the CPU backend only. Ranks are split into nodes in their order.

        Args:
            gb_per_s: Rate of this rank's link in 10^9 bytes per second; 0: none, rows go as fast as memory takes them.
            num_nodes: A divisor of the number of ranks.

        Raises:
            BadInput: A value cannot be used, or the ranks are on GPUs.
        """
        if self.device.backend != "cpu":
            raise BadInput("set_slow_link: the ranks are on GPUs; only the CPU backend has such a link")
        num_ranks = self.group.num_ranks
        if num_nodes < 1 or num_ranks % num_nodes:
            raise BadInput(f"num_nodes is {num_nodes}; wanted a divisor of {count(num_ranks, 'rank')}")
        if gb_per_s != 0:
            check_link_rate("gb_per_s", gb_per_s)
        self.native.set_slow_link(gb_per_s, num_ranks // num_nodes, self._heap.num_bytes)

    def barrier(self, capture: LaunchRecorder | None = None) -> None:
        """Waits until all ranks have arrived. A kernel of one warp, recorded where `capture` is given."""
        self._start_barrier(RANK_BARRIER, self._barrier_events, capture)
        self.synchronize()

    def align(self, capture: LaunchRecorder | None = None) -> None:
        """Starts a barrier of all ranks on the current stream: what is launched behind it begins together on all ranks.

        Where `capture` is given, it is recorded as a launch `align`, without its waits. The analysis leaves out what
        lies between the end of the launch before it and its own end.
        """
        self._start_barrier(ALIGN, _NO_EVENTS, capture)

    def _start_barrier(self, name: str, events: str, capture: LaunchRecorder | None) -> None:
        descriptor = 0
        self.require_usable()
        stream = self.device.streams.current()
        if capture is not None:
            epoch = self.native.barrier_epoch
            told = self.of_members(events)
            launch = capture.launch(name, grid=1, warps=1, stream=stream, events=told, epoch=epoch)
            descriptor = launch.descriptor
        with self.one_call(), self.guarded():
            self.launch(1, lambda first, last: self.native.barrier(descriptor=descriptor, stream=stream))

    def of_members(self, events: str | dict[str, Any]) -> str | dict[str, Any]:
        """Returns a kernel's event table with the ranks that this communicator has; as it is, where that is all."""
        if not self._members:
            return events
        if not isinstance(events, str):
            return {**events, "communicator": self._members}
        if events not in self._told:
            self._told[events] = json.dumps({**json.loads(events), "communicator": self._members})
        return self._told[events]

    def launch(self, num_kernels: int, run: Callable[[int, int], None]) -> None:
        """Launches kernels that wait for those of the other ranks. Resident ranks launch theirs together.

        Args:
            num_kernels: How many there are.
            run: Launches the kernels from its first argument up to its second on the stream that is current at this
                call. The thread of another resident rank may call it, where another stream is current.
        """
        if self.device.backend == "cpu":  # a launch returns when the kernel has ended
            run(0, num_kernels)
        else:
            self.group.launch(self.device.streams.current(), num_kernels, run, self._timeout_s)

    def synchronize(self) -> None:
        """Waits until this rank's kernels have finished.

        Raises:
            CommTimeout: A wait exceeded its limit.
            DeviceLost: The device cannot be used any more.
        """
        with self.guarded():
            self.device.streams.synchronize()

    @property
    def is_usable(self) -> bool:
        """Whether no failure is known, not even one that no call has raised yet."""
        return self._failure is None and self.native.fault() is None

    def require_usable(self) -> None:
        """Raises the first failure again: CommTimeout, CallBroken, BadInput or DeviceLost.

        A lost device stays lost; the others apply until reset().
        """
        if self._failure is None:
            return
        self._require_own_process()
        what = "restart the process" if self.device.error() else "call reset() on every rank"
        text = f"the communicator is out of use since: {self._failure}; {what}"
        if isinstance(self._failure, CommTimeout):
            raise CommTimeout(text, self._failure.fault)
        raise type(self._failure)(text)

    @contextlib.contextmanager
    def one_call(self) -> Iterator[None]:
        """Wraps kernels that form one call. An exception inside puts the communicator out of use until reset().

        If a kernel of the call is missing, the next call would mistake what the others left for its own data.
        """
        self.require_usable()
        self.board.clear_note()
        try:
            yield
        except BaseException as error:
            self._break_off("a call ended between its kernels", error)
            raise

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Wraps code that uses the device. Raises what check() raises, and DeviceLost if the device is lost."""
        self.require_usable()
        try:
            with self.device.active():
                yield
        except RuntimeError as error:
            self.check()
            problem = self.device.error()
            if not problem:
                raise
            lost = DeviceLost(f"rank {self.group.world_rank}: {problem} ({str(error).splitlines()[0]})")
            self._fail(lost)
            raise lost from error
        self.check()

    def check(self) -> None:
        """Raises CommTimeout if a wait of this rank has exceeded its limit, BadInput if a rank refused the call."""
        raw = self.native.fault()
        if raw is not None:
            fault = parse_fault(raw, self._fault_names) or {}
            text = describe_fault(fault)
            refused = fault.get("refusal")
            why = self.network.why_ended() if self.network else ""
            text += f"; the rank's proxy ended: {why}" if why else ""
            error = BadInput(text) if refused else CommTimeout(text + self.board.why_late(), fault)
            self._fail(error)
            raise error

    def _fail(self, error: CommTimeout | CallBroken | DeviceLost | BadInput) -> None:
        """Puts the communicator out of use, and tells the others."""
        self._failure = error
        text = f"is out of use: {error}"
        self.board.note(text[:MAX_TEXT], is_over=True, is_late=isinstance(error, CommTimeout))

    def _break_off(self, what: str, error: BaseException) -> None:
        if self._failure is None:
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            self._fail(CallBroken(f"rank {self.group.world_rank}: {what} ({why})"))

    # ---- calls of all ranks ----

    @contextlib.contextmanager
    def one_thread(self, what: str) -> Iterator[None]:
        """Wraps the call `what` of a user. Raises BadInput if another thread is in one."""
        self.enter_call(what)
        try:
            yield
        finally:
            self.leave_call()

    def enter_call(self, what: str) -> None:
        if not self._in_call.acquire(blocking=False):
            raise BadInput(f"{what}: another thread is in a call of this communicator; call from one thread at a time")

    def leave_call(self) -> None:
        self._in_call.release()

    def one_user_call(self, what: str) -> _UserCall:
        """Wraps the call `what` of a user, whose BadInput is told to ranks that wait for this one.

        Raises BadInput if another thread is in a call, and what require_usable() raises.
        """
        return _UserCall(self, what)

    def agree(self, what: str, check: Check, timeout_s: float, call: str = "") -> None:
        """Raises the same BadInput on all ranks if check() raises it on one, or returns other settings. Collective.

        what: what all ranks are in. call: the same with its settings, in words. Raises CommTimeout if a rank does not
        come within `timeout_s`, and BadInput on this rank alone if one has begun another call (Board.begin_call()).
        """
        try:
            said = Said(check)
            heard = self.board.meet(what, said.message(), timeout_s)
        except PassedBy as passed:
            said.settle([said.message()], [self.group.world_rank])
            theirs, own = (
                f"rank {passed.rank} runs {passed.call}",
                f"rank {self.group.world_rank} asks for {call or what}",
            )
            raise BadInput(f"{theirs}, {own}; all ranks make the same calls") from None
        except CommTimeout as error:
            self._fail(error)
            raise
        except BadInput:
            raise
        except BaseException as error:
            self._break_off(f"{what} ended before all ranks had come", error)
            raise
        said.settle(heard, self.group.world_ranks)

    def on_reset(self, call: Callable[[], None]) -> None:
        """Makes reset() run `call` on every rank while no kernel runs, to clear flags that live in the heap."""
        self._on_reset.append(call)

    def reset(self) -> None:
        """Clears the fault, flags and epochs, so that the communicator works again. Called by all ranks together.

        Raises:
            DeviceLost: A rank has lost its device. Raised on every rank.
        """
        self._require_own_process()
        if not self.device.error():
            self.device.streams.synchronize()
        told = self.group.all_gather(self.device.error(), "reset()")
        for rank, problem in zip(self.group.world_ranks, told, strict=True):
            if problem:
                raise DeviceLost(f"reset: rank {rank}: {problem}; restart all ranks")
        self.group.align_launches()
        with self.device.active():
            self.native.clear_control()
            if self.network:
                self.network.reset()
            for call in self._on_reset:
                call()
        self._failure = None
        self.board.clear()
        self.group.barrier()


class _UserCall:
    """See Communicator.one_user_call(). A class: three generators in each other took 11 us a call."""

    def __init__(self, comm: Communicator, what: str) -> None:
        self._comm, self._what = comm, what

    def __enter__(self) -> None:
        self._comm.enter_call(self._what)
        try:
            self._comm.require_usable()
        except BaseException:
            self._comm.leave_call()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        if isinstance(error, BadInput) and self._comm.is_usable:
            self._comm.board.note(f"refused {self._what}: {error}"[:MAX_TEXT])
        self._comm.leave_call()


def check_timeout(timeout_s: float, on_timeout: str) -> None:
    """Raises BadInput for values that set_timeout() cannot use."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, numbers.Real) or not 0 < timeout_s < 1e6:
        raise BadInput(f"timeout_s is {shown(timeout_s)}; wanted more than 0 and less than 1e6 seconds")
    check_choice("on_timeout", on_timeout, ("raise", "trap"))


def check_link_rate(name: str, gb_per_s: float) -> None:
    """Raises BadInput for a rate that no slow link has: rows wait for it, and each wait is to end."""
    low, high = LINK_GB_PER_S
    if not low <= gb_per_s <= high:  # as for nan
        raise BadInput(f"{name} is {gb_per_s:g}; wanted {low:g} to {high:g} GB/s")


def check_choice(name: str, value: Any, choices: tuple[str, str]) -> None:
    """Raises BadInput unless `value` is one of two texts."""
    if not isinstance(value, str) or value not in choices:
        raise BadInput(f"{name} is {shown(value)}; wanted {choices[0]!r} or {choices[1]!r}")


def _check_making(
    num_ranks: int, hosts: Any, num_bytes: Any, timeout_s: Any, backend: Any, on_timeout: Any, reserved_bytes: Any
) -> dict[str, Any]:
    """Raises BadInput for arguments that no Communicator is made with. Returns what ranks may not differ in."""
    check_timeout(timeout_s, on_timeout)
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, numbers.Integral) or not 0 < int(num_bytes) < 1 << 63:
        raise BadInput(
            f"num_bytes is {shown(num_bytes)}; wanted a whole number of bytes for each rank's part of the heap"
        )
    if reserved_bytes not in range(int(num_bytes) + 1):
        raise BadInput(f"reserved_bytes is {shown(reserved_bytes)}; wanted 0 to num_bytes, which is {num_bytes}")
    check_choice("backend", backend, ("cpu", "cuda"))
    return {"backend": backend, "hosts": check_hosts(hosts, num_ranks)}
