"""TransferEngine: memory that peers write to, and writes that count at their destination."""

from __future__ import annotations

import atexit
import contextlib
import logging
import reprlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tracekern.errors import BadInput, TracekernError
from tracekern.fabric.done import OnDone, TransferError, native_on_done
from tracekern.fabric.library import native, require_library
from tracekern.fabric.requests import (
    ROUND_ROBIN,
    SHARD_PEERS,
    DomainGroupRouting,
    GroupTransferRouting,
    PageIndices,
    PeerGroupHandle,
    ScatterSlice,
)
from tracekern.fabric.stale import remove_stale_segments
from tracekern.host_clock import anchor

if TYPE_CHECKING:
    import torch

    from tracekern.record.session import Capture

PROVIDERS = ("efa", "tcp", "shm")
"""Those of libfabric that an engine is known to work with, the best first."""
_LONGEST_S = 1e9
_MAX_ADDRESS_BYTES = 264
_AT_EXIT_S = 5.0
"""How long the process's exit waits for callbacks."""
_log = logging.getLogger("tracekern")
MAX_IMM = (1 << 32) - 1
CONNECT_LIMIT_S = 10.0
TRANSFER_LIMIT_S = 30.0
TRACED_RECORDS = 1 << 16
"""Room of each track of a traced engine: 1 MiB."""


@dataclass(frozen=True)
class Net:
    """A network interface that can be a domain of an engine."""

    provider: str
    source: str
    """An IP address, or the provider's name for it; "" is the provider's own choice."""
    fabric: str = ""
    """Peers must be in the same one."""
    bits_per_s: int = 0
    """0: not known."""


@dataclass(frozen=True)
class MemoryRegionHandle:
    """Registered memory as the source of writes."""

    region: int
    num_bytes: int
    owner: Any = field(repr=False, compare=False, default=None)
    """What keeps the memory alive."""


@dataclass(frozen=True)
class Transfer:
    """A transfer that was submitted, for TransferEngine.cancel()."""

    number: int
    """Of its engine, counted from 1."""


class DomainAddress:
    """Where an engine takes messages: opaque bytes, which can be hashed, sent and written as text.

    Who has it can send to the engine; nobody else can.
    """

    def __init__(self, address: bytes) -> None:
        if not 0 < len(address) <= _MAX_ADDRESS_BYTES:
            raise BadInput(f"a domain address has {len(address)} bytes; wanted 1 to {_MAX_ADDRESS_BYTES}")
        self._bytes = bytes(address)

    @classmethod
    def from_text(cls, text: str) -> DomainAddress:
        """Raises BadInput for what str() of an address never is."""
        try:
            address = bytes.fromhex(text)
        except ValueError:
            address = b""
        if not text or address.hex() != text:  # fromhex() also takes spaces and capitals
            raise BadInput(f"domain address {text[:40]!r}; wanted pairs of the digits 0 to f")
        return cls(address)

    def __bytes__(self) -> bytes:
        return self._bytes

    def __str__(self) -> str:
        return self._bytes.hex()

    def __repr__(self) -> str:
        return f"DomainAddress({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DomainAddress) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)


class MemoryRegionDescriptor:
    """Registered memory as peers see it, who write there: an address and a key for each domain. It can be pickled."""

    def __init__(self, packed: bytes) -> None:
        """Raises BadInput for what to_bytes() never returns."""
        with _bad_input():
            self.native = native().MemoryRegionDescriptor.from_bytes(packed)

    def to_bytes(self) -> bytes:
        return bytes(self.native.to_bytes())

    @property
    def num_bytes(self) -> int:
        return int(self.native.num_bytes)

    @property
    def num_domains(self) -> int:
        return int(self.native.num_domains)

    def __reduce__(self) -> tuple[type[MemoryRegionDescriptor], tuple[bytes]]:
        return MemoryRegionDescriptor, (self.to_bytes(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryRegionDescriptor) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())


class ImmCounter:
    """Counts an immediate from now on, early arrivals included; what one wait leaves is there for the next."""

    def __init__(self, engine: Any, counter: Any) -> None:
        self._engine, self._counter = engine, counter

    @property
    def imm(self) -> int:
        return int(self._counter.imm)

    @property
    def count(self) -> int:
        """Arrivals that no wait has taken."""
        return int(self._counter.count)

    def wait(self, count: int, timeout_s: float = CONNECT_LIMIT_S) -> None:
        """Waits for `count` more, and takes them.

        Raises TransferError, which names the senders, when they do not come in time, when one of the senders dies, and
        when the engine is stopped. What has come is kept for another wait; a death is told once.
        """
        with _bad_input(TransferError, f"immediate {self.imm}: "):
            if self._counter.wait(count, timeout_s):
                return
        senders = self._engine.describe_senders(self.imm)
        raise TransferError(
            f"immediate {self.imm}: {self.count} of {count} have come within {timeout_s:g} s; {senders}", "stalled"
        )


class ScalarWatcher:
    """A 64-bit word that the engine watches: kernels and threads write to it, by its address or as a tensor."""

    def __init__(self, engine: Any, callback: Callable[[int, int], bool]) -> None:
        import torch

        # Of pinned memory the address is also the device's.
        is_pinned = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self.tensor = torch.zeros(1, dtype=torch.int64, pin_memory=is_pinned)
        self._engine = engine
        self._number = engine.watch(self.address, self.tensor, callback)

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def free(self) -> None:
        """Ends the watch. Afterwards the callback is not called any more; the memory lives as long as the tensor."""
        self._engine.unwatch(self._number)


class TransferEngineBuilder:
    """Says what an engine is made of."""

    def __init__(self) -> None:
        self._groups: list[tuple[list[Net], int]] = []
        self._connect_limit_s, self._transfer_limit_s = CONNECT_LIMIT_S, TRANSFER_LIMIT_S

    def add_domains(self, nets: Sequence[Net], pin_worker_cpu: int = -1) -> TransferEngineBuilder:
        """Adds a group of 1 to 4 interfaces, used side by side: those of one GPU, all groups with as many.

        pin_worker_cpu: where their thread stays; -1: anywhere.
        """
        self._groups.append((list(nets), pin_worker_cpu))
        return self

    def connect_limit(self, seconds: float) -> TransferEngineBuilder:
        """Sets how long a peer may take to answer the first time."""
        self._connect_limit_s = seconds
        return self

    def transfer_limit(self, seconds: float) -> TransferEngineBuilder:
        """Sets how long a transfer may take that says nothing else. A peer that is silent for as long is dead."""
        self._transfer_limit_s = seconds
        return self

    def build(self) -> TransferEngine:
        """Opens the domains. Raises BadInput, and TransferError where one cannot be opened."""
        numbers = sorted({len(nets) for nets, _ in self._groups})
        if len(numbers) != 1:
            raise BadInput(f"groups of {numbers} domains; wanted at least one group, and as many domains in each")
        limits = self._connect_limit_s, self._transfer_limit_s
        (nets, pin_cpu), *others = self._groups
        first = TransferEngine(nets, pin_cpu, *limits)
        try:
            first._others = tuple(TransferEngine(*group, *limits, first=first) for group in others)
        except TracekernError:
            first.stop()
            raise
        return first


_made: list[list[weakref.ref[Any]]] = []
"""The compiled engines of this process, each with the groups behind it."""


@atexit.register
def _stop_all() -> None:
    """Stops at the process's exit what still runs: its threads could not call Python any more."""
    for groups in _made:
        for group in reversed(groups):
            if (running := group()) is not None:
                running.stop(_AT_EXIT_S)
    if _made and not native().have_callbacks_ended(_AT_EXIT_S):
        _log.warning("a callback of a TransferEngine has not returned; the process ends without it")


class TransferEngine:
    """One-sided writes to registered memory of peers. Nothing is promised about the order in which they arrive."""

    def __init__(
        self,
        nets: Sequence[Net],
        pin_cpu: int = -1,
        connect_limit_s: float = CONNECT_LIMIT_S,
        transfer_limit_s: float = TRANSFER_LIMIT_S,
        first: TransferEngine | None = None,
    ) -> None:
        """See TransferEngineBuilder. All peers need as many nets. first: see groups."""
        pairs = [(net.provider, net.source) for net in nets]
        limits = _check_limit(connect_limit_s), _check_limit(transfer_limit_s)
        if any(net.provider == "shm" for net in nets):
            remove_stale_segments()
        with _bad_input(TransferError):
            shared = first._engine if first else None
            self._engine: Any = native().TransferEngine(require_library(), pairs, pin_cpu, *limits, shared)
        self._compiled: list[weakref.ref[Any]] = first._compiled if first else []
        self._compiled.append(weakref.ref(self._engine))
        if first is None:
            _made[:] = [groups for groups in _made if any(group() is not None for group in groups)]
            _made.append(self._compiled)
        self.nets = tuple(nets)
        self._others: tuple[TransferEngine, ...] = ()
        self._traced_by: Capture | None = None
        self.set_peer_callback(_log.warning)

    @staticmethod
    def builder() -> TransferEngineBuilder:
        return TransferEngineBuilder()

    @staticmethod
    def detect_topology(providers: Sequence[str] = PROVIDERS) -> list[Net]:
        """Returns the interfaces of this host that an engine can use, those of the first provider first."""
        return [Net(*found) for found in native().find_nets(require_library(), list(providers))]

    @property
    def num_domains(self) -> int:
        """Of a group: each of its peers has as many."""
        return len(self.nets)

    @property
    def nets_per_gpu(self) -> int:
        """The same, where each GPU has a group."""
        return self.num_domains

    @property
    def groups(self) -> tuple[TransferEngine, ...]:
        """Groups of domains, each with a thread, memory, peers and an address of its own.

        They share immediates, their counters and the callback thread. The first is the engine itself, which stops all.
        """
        return self, *self._others

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def aggregated_link_speed(self) -> int:
        """Bits a second of all domains; 0 where one is not known."""
        speeds = [net.bits_per_s for net in self.nets]
        return sum(speeds) if all(speeds) else 0

    @property
    def main_address(self) -> DomainAddress:
        with _bad_input():
            return DomainAddress(self._engine.main_address)

    def stop(self) -> None:
        """Ends what is under way, calls back for all of it, and closes the domains.

        In a callback of the engine, the rest is called when that one has returned. Raises TransferError when a callback
        does not return within the limit for transfers; it goes on.
        """
        have_ended = [group._engine.stop() for group in reversed(self.groups)]
        if not all(have_ended):
            raise TransferError("the engine was stopped, but one of its callbacks has not returned, and goes on")

    @contextlib.contextmanager
    def traced(self, capture: Capture, records: int = TRACED_RECORDS) -> Iterator[None]:
        """Records transfers, arrivals and waits into an open capture, until the block ends.

        records: room of each track; a transfer takes two records, each of its writes one, each arrival one. Within
        another block for the same capture this one does nothing; raises BadInput within one for another capture.
        """
        if self._traced_by is capture:
            yield
            return
        if self._traced_by is not None:
            raise BadInput("traced: the engine records into another capture; wanted one at a time")
        self._traced_by = capture
        native().anchor_host_time(anchor().ns)
        try:
            for group in self.groups:
                tracks = capture.host_tracks("transfers", native().describe_events(), group._track_names(), records)
                with _bad_input():
                    if tracks:
                        group._engine.start_trace(tracks)
            yield
        finally:
            self._traced_by = None
            for group in self.groups:
                group._engine.stop_trace()

    def _track_names(self) -> list[str]:
        domains = [f"domain {idx} {net.provider} {net.source}".rstrip() for idx, net in enumerate(self.nets)]
        return ["transfers", "arrivals", "waits", "clocks", *domains]

    # ---- memory ----

    def register_memory(
        self, address: int, num_bytes: int, owner: Any = None
    ) -> tuple[MemoryRegionHandle, MemoryRegionDescriptor]:
        """Returns the handle for writes from there, and the descriptor for peers that write there.

        owner: whatever keeps the memory. The engine holds it until nobody can write there or read from there any more.
        """
        with _bad_input(TransferError):
            region = self._engine.register_memory(address, num_bytes, owner)
            descriptor = MemoryRegionDescriptor(self._engine.describe(region).to_bytes())
        return MemoryRegionHandle(region, num_bytes, owner), descriptor

    def register_tensor(self, tensor: torch.Tensor) -> tuple[MemoryRegionHandle, MemoryRegionDescriptor]:
        """The same of a contiguous tensor's memory, which the engine keeps alive."""
        if not tensor.is_contiguous():
            raise BadInput("register_tensor: the tensor is not contiguous; register tensor.contiguous()")
        if tensor.device.type != "cpu":
            raise BadInput(f"register_tensor: the tensor is on {tensor.device}; memory of GPUs is not supported yet")
        return self.register_memory(tensor.data_ptr(), tensor.nbytes, tensor)

    def unregister_memory(self, handle: MemoryRegionHandle, timeout_s: float | None = None) -> None:
        """Takes memory back: peers can submit no more writes to it, and those under way are waited for.

        Raises TransferError, whose outcome is "stalled", when it is not known after timeout_s, None: the engine's limit
        for transfers, that nobody reads or writes it any more. Its owner is then kept until stop(); memory without one
        must stay. It can be called again.
        """
        with _bad_input():
            held = self._engine.unregister_memory(handle.region, _check_limit(timeout_s))
        if held:
            raise TransferError(f"memory region {handle.region} is in use until stop(): {held}", "stalled")

    # ---- transfers ----

    def submit_write(
        self,
        src: MemoryRegionHandle,
        dst: MemoryRegionDescriptor,
        num_bytes: int,
        *,
        src_offset: int = 0,
        dst_offset: int = 0,
        imm: int | None = None,
        num_shards: int = 0,
        routing: DomainGroupRouting = ROUND_ROBIN,
        timeout_s: float | None = None,
        on_done: OnDone,
    ) -> Transfer:
        """Writes to a peer's memory, in shards over the domains. With `imm` each shard raises it there.

        num_shards stands for DomainGroupRouting.round_robin(num_shards). timeout_s: the limit for all of it; None: the
        engine's.
        """
        if num_shards:
            if routing != ROUND_ROBIN:
                raise BadInput(f"num_shards is {num_shards}, and routing is {routing}; wanted one of them")
            routing = DomainGroupRouting.round_robin(num_shards)
        place = src.region, src_offset, num_bytes, dst.native, dst_offset
        how = _check_imm(imm), routing, _check_limit(timeout_s)
        with _bad_input():
            return Transfer(self._engine.submit_write(*place, *how, native_on_done(on_done)))

    def submit_paged_writes(
        self,
        src: MemoryRegionHandle,
        src_pages: PageIndices,
        dst: MemoryRegionDescriptor,
        dst_pages: PageIndices,
        page_bytes: int,
        *,
        imm: int | None = None,
        routing: DomainGroupRouting = ROUND_ROBIN,
        timeout_s: float | None = None,
        on_done: OnDone,
    ) -> Transfer:
        """Writes page for page. With `imm` each page raises it there."""
        pages = src.region, src_pages.as_native, dst.native, dst_pages.as_native, page_bytes
        how = _check_imm(imm), routing, _check_limit(timeout_s)
        with _bad_input():
            return Transfer(self._engine.submit_paged_writes(*pages, *how, native_on_done(on_done)))

    def submit_imm(
        self, dst: MemoryRegionDescriptor, imm: int, on_done: OnDone, timeout_s: float | None = None
    ) -> Transfer:
        """Raises an immediate at the engine whose memory that is, and writes nothing."""
        how = _check_imm(imm), _check_limit(timeout_s)
        with _bad_input():
            return Transfer(self._engine.submit_imm(dst.native, *how, native_on_done(on_done)))

    def cancel(self, transfer: Transfer) -> None:
        """Sends no more of a transfer. It ends when what was sent has: as cancelled, or as usual if that was all."""
        with _bad_input():
            self._engine.cancel(transfer.number)

    # ---- groups of peers ----

    def add_peer_group(self, memory: Sequence[MemoryRegionDescriptor]) -> PeerGroupHandle:
        """Returns a handle for writes to memory of several peers, and begins to meet those that are new.

        Addresses and keys are looked up once, not in each request. Nothing is written before all have answered.
        """
        with _bad_input():
            group = self._engine.add_peer_group([descriptor.native for descriptor in memory])
        return PeerGroupHandle(len(memory), group)

    def submit_scatter(
        self,
        group: PeerGroupHandle,
        src: MemoryRegionHandle,
        slices: Sequence[ScatterSlice],
        *,
        imm: int | None = None,
        routing: GroupTransferRouting = SHARD_PEERS,
        timeout_s: float | None = None,
        on_done: OnDone,
    ) -> Transfer:
        """Writes to each peer its slice; without bytes it still raises `imm`. One transfer: done when all are."""
        what = group.native, src.region, slices
        how = _check_imm(imm), routing, _check_limit(timeout_s)
        with _bad_input():
            return Transfer(self._engine.submit_scatter(*what, *how, native_on_done(on_done)))

    def submit_barrier(
        self,
        group: PeerGroupHandle,
        imm: int,
        *,
        routing: GroupTransferRouting = SHARD_PEERS,
        timeout_s: float | None = None,
        on_done: OnDone,
    ) -> Transfer:
        """Raises an immediate at each peer. Writes submitted before may arrive after it: count their own."""
        how = _check_imm(imm), routing, _check_limit(timeout_s)
        with _bad_input():
            return Transfer(self._engine.submit_barrier(group.native, *how, native_on_done(on_done)))

    # ---- messages ----

    def submit_send(self, to: DomainAddress, payload: bytes, on_done: OnDone) -> None:
        """Sends a message to an engine's main address. The payload is copied. Done: a callback there has it.

        An error says so where that engine takes no messages, none of this size, or has all its buffers in use.
        """
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise BadInput(f"submit_send: the payload is {reprlib.repr(payload)}; wanted bytes")
        with _bad_input():
            self._engine.submit_send(bytes(to), bytes(payload), native_on_done(on_done))

    def submit_bouncing_recvs(self, num_bytes: int, count: int, callback: Callable[[memoryview], None]) -> None:
        """Takes messages of up to `num_bytes`, and lends each to the callback, on the engine's callback thread.

        At most `count` are lent at a time; a sender is told that all are in use. The view ends with the call; parts of
        it that are kept keep their buffer.
        """
        with _bad_input():
            self._engine.submit_bouncing_recvs(num_bytes, count, callback)

    def set_peer_callback(self, callback: Callable[[str], None]) -> None:
        """Sets what is called, on the engine's callback thread, when a peer is dead, or has lost writes that it
        confirmed, or the engine itself is broken. Without it, the log has a warning."""
        with _bad_input(TransferError):
            for group in self.groups:
                group._engine.on_peer(callback)

    # ---- immediates ----

    def set_imm_count_expected(self, imm: int, count: int, on_reached: Callable[[], None]) -> None:
        """Calls once when `count` have come, early ones included, and releases the immediate."""
        with _bad_input():
            self._engine.expect_imm_count(_check_imm(imm), count, on_reached)

    def make_imm_counter(self, imm: int, senders: Iterable[DomainAddress] = ()) -> ImmCounter:
        """senders: main addresses of engines that raise it, whose death ends a wait; none: any that has raised it."""
        with _bad_input():
            counter = self._engine.make_imm_counter(_check_imm(imm), {bytes(sender) for sender in senders})
        return ImmCounter(self._engine, counter)

    def remove_imm_count(self, imm: int) -> tuple[int, int]:
        """Ends the use of an immediate. Returns how many had come unused, and how many an expectation still lacked."""
        with _bad_input():
            unused, lacking = self._engine.remove_imm_count(_check_imm(imm))
        return int(unused), int(lacking)

    def set_imm_callback(self, callback: Callable[[int], None]) -> None:
        """Sets what is called with each immediate that nobody counts. What had come before is kept for its user."""
        with _bad_input():
            self._engine.set_imm_callback(callback)

    # ---- words that kernels write to ----

    def alloc_scalar_watcher(self, callback: Callable[[int, int], bool]) -> ScalarWatcher:
        """Returns a word in host memory, 0 at first, pinned where CUDA is in use.

        Calls with the values before and after each change that it sees, on the one thread that watches all words;
        several changes may be one call. The callback returns whether to go on. Ended by free() and stop(), too.
        """
        with _bad_input():
            return ScalarWatcher(self._engine, callback)


def _check_limit(seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds < _LONGEST_S:
        raise BadInput(f"a time limit of {seconds} s; wanted more than 0 and less than {_LONGEST_S}")
    return seconds


def _check_imm(imm: int | None) -> int | None:
    if imm is not None and not 0 <= imm <= MAX_IMM:
        raise BadInput(f"imm is {imm}; wanted 0 to {MAX_IMM}, 32 bits")
    return imm


class _bad_input:  # noqa: N801  # reads as a statement
    """What the native part refuses is the caller's; what it fails at is the network's."""

    def __init__(self, failure: type[TracekernError] = BadInput, about: str = "") -> None:
        self._failure, self._about = failure, about

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TypeError) and "Invoked with: " in str(error):  # pybind11, of a number that does not fit
            given = str(error).split("Invoked with: ")[1].split(">, ", 1)[-1].splitlines()[0]
            raise BadInput(f"wanted whole numbers from 0 to 2^64 - 1, got {given}") from None
        if isinstance(error, ValueError) and not isinstance(error, BadInput):
            raise BadInput(str(error)) from None
        if isinstance(error, RuntimeError) and not isinstance(error, TracekernError):
            raise self._failure(self._about + str(error)) from None
