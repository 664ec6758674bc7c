"""The decoder: lends pages to prefillers, counts their writes, and takes pages back when no write can land there."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from examples.kv_cache.protocol import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Cancelled,
    Layout,
    MalformedMessage,
    Request,
    content,
    decode,
    encode,
)
from tracekern import BadInput, TracekernError
from tracekern.fabric import (
    DomainAddress,
    DomainGroupRouting,
    ImmCounter,
    MemoryRegionDescriptor,
    MemoryRegionHandle,
    TransferEngine,
    TransferError,
    count_immediates,
)

BEAT_S, PULSE_IMM = 0.1, 0
"""Time between heartbeats, and their immediate."""
PULSE_LIMIT_S = 30.0
"""Longer than the engine waits for signs of life: it is the engine that says who is dead."""


class PrefillFailed(TracekernError):
    """A cache has not come; the text says from whom, and why. Its pages come back by themselves."""


class PageState(Enum):
    FREE = "free"
    LENT = "lent"
    CANCELLING = "being cancelled"


class PagePool:
    """Which pages can be lent. Any thread."""

    def __init__(self, num_pages: int) -> None:
        self._states = [PageState.FREE] * num_pages
        self._changed = threading.Condition()

    def count(self, state: PageState) -> int:
        return self._states.count(state)

    def lend(self, count: int, timeout_s: float) -> tuple[int, ...]:
        """Waits for free pages. Raises BadInput when there are not enough in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.count(PageState.FREE) >= count, timeout_s):
                told = ", ".join(f"{self.count(state)} are {state.value}" for state in PageState)
                raise BadInput(f"{count} pages wanted; {told}")
            pages = tuple(page for page, state in enumerate(self._states) if state is PageState.FREE)[:count]
            self._set(pages, PageState.LENT)
            return pages

    def cancel(self, pages: Sequence[int]) -> None:
        with self._changed:
            self._set(pages, PageState.CANCELLING)

    def free(self, pages: Sequence[int]) -> None:
        with self._changed:
            self._set(pages, PageState.FREE)
            self._changed.notify_all()

    def _set(self, pages: Sequence[int], state: PageState) -> None:
        for page in pages:
            self._states[page] = state


@dataclass
class _Lent:
    """Pages that a prefiller may write to."""

    request: int
    pages: tuple[int, ...]
    until: float
    counter: ImmCounter
    is_cancelling: bool = False
    is_answered: bool = False
    """The request has been taken or refused: a cancel cannot overtake it any more."""
    is_harmless: bool = True
    """No write can land there: it was not asked for yet, or the prefiller has confirmed."""


@dataclass
class _Link:
    """One prefiller. The pool is registered for each: taking that back ends this one's writes, and nobody else's."""

    name: str
    address: DomainAddress
    pulse: MemoryRegionDescriptor
    """Heartbeats are immediates there: they end when the peer is dead, where a message may wait for its limit."""
    handle: MemoryRegionHandle
    memory: bytes
    lost: str = ""
    is_revoked: bool = False
    is_beating: bool = False
    lent: dict[int, _Lent] = field(default_factory=dict)


@dataclass(frozen=True)
class Cache:
    """A prompt's cache, complete."""

    pages: tuple[int, ...]
    memory: torch.Tensor
    layout: Layout

    def wrong_bytes(self, seed: int) -> int:
        """Returns how many bytes are not those of the prompt."""
        layout, wrong = self.layout, 0
        for layer in range(layout.layers):
            for number, page in enumerate(self.pages):
                at = layout.layer_offset(layer) + page * layout.page_bytes
                wanted = content(seed, layer, number, layout.page_bytes)
                wrong += int((self.memory[at : at + layout.page_bytes] != wanted).sum())
        at = layout.tail_offset(self.pages[0])
        tail = content(seed, layout.layers, 0, layout.tail_bytes)
        return wrong + int((self.memory[at : at + layout.tail_bytes] != tail).sum())


class Decoder:
    """Has a pool of pages, and asks prefillers to fill them."""

    def __init__(self, engine: TransferEngine, layout: Layout) -> None:
        self.engine, self.layout, self.pool = engine, layout, PagePool(layout.pool_pages)
        self.memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        self.uncounted = 0
        self._links: list[_Link] = []
        self._lock, self._next_imm, self._is_over = threading.Lock(), 0, threading.Event()
        engine.set_imm_callback(self._drop)
        engine.set_peer_callback(lambda why: None)  # heartbeats say whose prefiller it is
        engine.submit_bouncing_recvs(MAX_MESSAGE_BYTES, 64, self._take)
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()

    def stop(self) -> None:
        self._is_over.set()
        self._looking.join()
        self.engine.stop()

    def add_prefiller(self, name: str, address: DomainAddress, pulse: MemoryRegionDescriptor) -> _Link:
        handle, descriptor = self.engine.register_tensor(self.memory)
        link = _Link(name, address, pulse, handle, descriptor.to_bytes())
        with self._lock:
            self._links.append(link)
        return link

    @contextlib.contextmanager
    def fetch(self, link: _Link, seed: int, num_pages: int, deadline_s: float) -> Iterator[Cache]:
        """Lends the complete cache until the block ends. Raises PrefillFailed, and BadInput without free pages."""
        if link.lost:
            raise PrefillFailed(f"{link.name}: {link.lost}")
        until, pages = time.monotonic() + deadline_s, self.pool.lend(num_pages, deadline_s)
        with self._lock:
            self._next_imm = imm = self._next_imm + 1
            lent = _Lent(secrets.randbits(64), pages, until, self.engine.make_imm_counter(imm))
            link.lent[lent.request] = lent
        reply_to = bytes(self.engine.main_address)
        try:
            request = encode(Request(lent.request, imm, seed, self.layout, reply_to, link.memory, lent.pages))
            lent.is_harmless = False
            self.engine.submit_send(link.address, request, lambda error: self._hear(link, error, lent))
            self._wait_for(self.num_writes(num_pages), link, lent, deadline_s)
            yield Cache(lent.pages, self.memory, self.layout)
            self._give_back(link, lent)
        except BaseException:
            self._cancel(link, lent)
            raise
        finally:
            self.engine.remove_imm_count(imm)

    def num_writes(self, num_pages: int) -> int:
        """Returns how many writes a request takes: one for each page of each layer, and the tail."""
        tail = count_immediates(DomainGroupRouting.round_robin(), self.engine.num_domains)
        return self.layout.layers * num_pages + tail

    def _wait_for(self, wanted: int, link: _Link, lent: _Lent, deadline_s: float) -> None:
        while True:
            left_s = lent.until - time.monotonic()
            try:
                return lent.counter.wait(wanted, min(BEAT_S, max(0.001, left_s)))
            except TransferError:
                why = link.lost or ("it has given the request up" if lent.is_harmless else "")
                if not why and left_s < 0:
                    why = f"the deadline of {deadline_s:g} s is over"
                if why:
                    come = f"{lent.counter.count} of {wanted} writes had come"
                    raise PrefillFailed(f"{link.name}: {why}; {come}") from None

    def _cancel(self, link: _Link, lent: _Lent) -> None:
        """Keeps the pages until no write can land there."""
        with self._lock:
            lent.is_cancelling = True
            self.pool.cancel(lent.pages)
        if lent.is_harmless:
            self._give_back(link, lent)

    def _give_back(self, link: _Link, lent: _Lent) -> None:
        with self._lock:
            if link.lent.pop(lent.request, None) is not None:
                self.pool.free(lent.pages)

    def _drop(self, imm: int) -> None:
        self.uncounted += 1

    def _take(self, view: memoryview) -> None:
        with contextlib.suppress(MalformedMessage):
            message = decode(bytes(view))
            if isinstance(message, Cancelled):
                for link in self._links:
                    if (lent := link.lent.get(message.request)) is not None:
                        self._hear_confirmed(link, lent)

    def _hear_confirmed(self, link: _Link, lent: _Lent) -> None:
        lent.is_harmless = True
        if lent.is_cancelling:
            self._give_back(link, lent)

    # ---- prefillers that are late or dead ----

    def _hear(self, link: _Link, error: TransferError | None, lent: _Lent) -> None:
        """A request has been taken or refused."""
        lent.is_answered = True
        if error is not None and "receive buffers are in use" not in str(error):
            link.lost = link.lost or str(error)

    def _feel(self, link: _Link, error: TransferError | None) -> None:
        """A heartbeat has ended."""
        link.is_beating = False
        if error is not None:
            link.lost = link.lost or f"heartbeat: {error}"

    def _look(self) -> None:
        while not self._is_over.wait(BEAT_S):
            for link in list(self._links):
                if link.lent and not link.lost:
                    self._beat(link)
                if link.lost:
                    self._take_back(link)

    def _beat(self, link: _Link) -> None:
        """Feels whether it lives, and repeats cancels."""
        if not link.is_beating:
            link.is_beating = True
            self.engine.submit_imm(link.pulse, PULSE_IMM, lambda error: self._feel(link, error), PULSE_LIMIT_S)
        for lent in list(link.lent.values()):
            if lent.is_cancelling and lent.is_answered:
                cancel = encode(Cancel(lent.request, bytes(self.engine.main_address)))
                self.engine.submit_send(link.address, cancel, lambda error: None)

    def _take_back(self, link: _Link) -> None:
        """Nothing of a lost prefiller can land once its registration is gone; until then its pages stay."""
        if not link.is_revoked:
            with contextlib.suppress(TransferError):
                self.engine.unregister_memory(link.handle, timeout_s=BEAT_S)
                link.is_revoked = True
        for lent in list(link.lent.values()):
            if link.is_revoked and lent.is_cancelling and time.monotonic() > lent.until:
                self._give_back(link, lent)
