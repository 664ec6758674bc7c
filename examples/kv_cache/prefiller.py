"""The prefiller: layers count a watched word up, and the watcher's thread writes the pages of each layer."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from dataclasses import dataclass, field

import torch

from examples.kv_cache.model import Model
from examples.kv_cache.protocol import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Cancelled,
    Layout,
    MalformedMessage,
    Request,
    decode,
    encode,
)
from tracekern import TracekernError
from tracekern.fabric import DomainAddress, MemoryRegionDescriptor, PageIndices, Transfer, TransferEngine, TransferError

LIMIT_S = 60.0
"""Longest wait for the watcher and for writes, which end by themselves much earlier."""
_log = logging.getLogger("kv_cache")


@dataclass
class _Job:
    """A request under way. Its transfers are changed under `changed` only."""

    request: Request
    memory: MemoryRegionDescriptor
    is_cancelled: bool = False
    is_unsure: bool = False
    """Writes may still land, or read the cache here."""
    under_way: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)


class Prefiller:
    """Serves requests one after the other."""

    def __init__(
        self, engine: TransferEngine, layout: Layout, max_pages: int, layer_s: float = 0.0, device: str = "cpu"
    ) -> None:
        """layout: pool_pages is the decoder's to choose. layer_s: see Model. device: "cuda" takes a CUDA graph."""
        self.engine, self._layer_s, self._device = engine, layer_s, device
        self._own = Layout(layout.layers, layout.page_bytes, max_pages, layout.tail_bytes)
        self._jobs: dict[int, _Job] = {}
        self._current: _Job | None = None
        # Values of the word: where the current job began, and up to which all is submitted.
        self._first = self._seen = 0
        self._has_seen = threading.Condition()
        self._queue: queue.Queue[_Job | None] = queue.Queue()
        self.refused = 0
        if device == "cuda":
            torch.cuda.init()  # before the word: it is pinned then
        self._word = engine.alloc_scalar_watcher(self._on_layers)
        self._take_cache()
        _, self.pulse = engine.register_tensor(torch.zeros(8, dtype=torch.uint8))  # heartbeats write nothing there
        engine.submit_bouncing_recvs(MAX_MESSAGE_BYTES, 64, self._take)
        self._thread = threading.Thread(target=self._serve, name="model", daemon=True)
        self._thread.start()

    def _take_cache(self) -> None:
        self._cache = torch.zeros(self._own.num_bytes, dtype=torch.uint8, pin_memory=self._device == "cuda")
        self.model = Model(self._own, self._cache, self._word.tensor, self._layer_s, self._device)
        self._src, _ = self.engine.register_tensor(self._cache)

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self.engine.stop()

    # ---- messages, on the engine's callback thread ----

    def _take(self, view: memoryview) -> None:
        try:
            message = decode(bytes(view))
            if isinstance(message, Request):
                self._accept(message)
            elif isinstance(message, Cancel):
                self._cancel(message)
        except TracekernError as error:
            self.refused += 1
            _log.warning("a message was refused: %s", error)

    def _accept(self, request: Request) -> None:
        asked, own = request.layout, self._own
        if (asked.layers, asked.page_bytes, asked.tail_bytes) != (own.layers, own.page_bytes, own.tail_bytes):
            raise MalformedMessage(f"a request for {asked}; this model has {own}")
        if len(request.pages) > own.pool_pages:
            raise MalformedMessage(f"a request of {len(request.pages)} pages; wanted at most {own.pool_pages}")
        memory = MemoryRegionDescriptor(request.memory)
        if memory.num_bytes < asked.num_bytes:
            raise MalformedMessage(f"a request's memory has {memory.num_bytes} bytes; wanted {asked.num_bytes}")
        if request.request in self._jobs:
            raise MalformedMessage(f"request {request.request} has come twice")
        DomainAddress(request.reply_to)  # raises BadInput where nobody could be told
        job = self._jobs[request.request] = _Job(request, memory)
        self._queue.put(job)

    def _cancel(self, message: Cancel) -> None:
        """A request that is not known has ended: messages are called back in order, and its own came before."""
        job = self._jobs.get(message.request)
        if job is None:
            return self._confirm(message.request, message.reply_to)
        with job.changed:
            job.is_cancelled = True
            for transfer in job.transfers:
                self.engine.cancel(transfer)
        return None

    # ---- layers ----

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            self._first, self._current = self._seen, job
            if not job.is_cancelled:
                self.model.run(job.request.seed, lambda job=job: not job.is_cancelled)
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        """Returns when no write of the job is under way. What stalled may still land: that is never confirmed."""
        with self._has_seen:
            is_over = self._has_seen.wait_for(lambda: self._seen == int(self._word.tensor[0]), LIMIT_S)
        with job.changed:
            is_over &= job.changed.wait_for(lambda: job.under_way == 0, LIMIT_S)
        if job.is_unsure or not is_over:
            return self._renew()
        del self._jobs[job.request.request]
        if job.is_cancelled:
            self._confirm(job.request.request, job.request.reply_to)
        return None

    def _renew(self) -> None:
        """Takes another cache. Late writes may still read the old one, which the engine keeps until they have ended."""
        with contextlib.suppress(TransferError):
            self.engine.unregister_memory(self._src, timeout_s=0.1)
        self._take_cache()

    def _confirm(self, request: int, reply_to: bytes) -> None:
        """A confirmation that is lost is asked for again."""
        self.engine.submit_send(DomainAddress(reply_to), encode(Cancelled(request)), lambda error: None)

    # ---- writes, on the watcher's thread ----

    def _on_layers(self, old: int, new: int) -> bool:
        job = self._current
        for value in range(old, new):
            if job is not None:
                self._write(job, value - self._first)
        with self._has_seen:
            self._seen = new
            self._has_seen.notify_all()
        return True

    def _write(self, job: _Job, layer: int) -> None:
        """Writes a layer, unless the job is over. What cannot be submitted ends the job, as a cancel does."""
        with job.changed:
            if job.is_cancelled:
                return
            try:
                self._submit(job, layer)
            except TracekernError as error:
                job.is_cancelled = True
                _log.warning("layer %d of request %d was not written: %s", layer, job.request.request, error)

    def _submit(self, job: _Job, layer: int) -> None:
        """Submits the pages of a layer, and the tail behind the last one."""
        request, own, asked = job.request, self._own, job.request.layout
        src = PageIndices(range(len(request.pages)), own.page_bytes, own.layer_offset(layer))
        dst = PageIndices(request.pages, own.page_bytes, asked.layer_offset(layer))

        def ended(error: TransferError | None) -> None:
            with job.changed:
                job.under_way -= 1
                job.is_cancelled |= error is not None
                job.is_unsure |= error is not None and error.outcome == "stalled"
                job.changed.notify_all()

        def add(transfer: Transfer) -> None:
            job.transfers.append(transfer)
            job.under_way += 1  # `ended` waits for the lock

        submit = self.engine.submit_paged_writes
        add(submit(self._src, src, job.memory, dst, own.page_bytes, imm=request.imm, on_done=ended))
        if layer == own.layers - 1:
            offsets = {"src_offset": own.tail_offset(0), "dst_offset": asked.tail_offset(request.pages[0])}
            submit_tail = self.engine.submit_write
            add(submit_tail(self._src, job.memory, own.tail_bytes, **offsets, imm=request.imm, on_done=ended))
