"""The pipeline of a rank: stages that each have a thread, and slots of memory that groups take turns in.

While one group is written, the next is prepared and the one after it copied. A group keeps its slot until the last
stage is done with it, so what is under way never takes more memory than the slots have.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import tracekern
from examples.weights.model import FP8, quantize
from examples.weights.schedule import RankGroup, Write
from tracekern.fabric import (
    DoneCounter,
    ImmCounter,
    MemoryRegionDescriptor,
    MemoryRegionHandle,
    TransferEngine,
    TransferError,
)

LIMIT_S = 60.0
_ASK_S = 0.5
"""How often a wait for peers looks whether one of them is lost."""


class Slot:
    """Memory for one group: its parameters as they were copied, and what was prepared of them."""

    def __init__(self, engine: TransferEngine, num_elements: int, prepared_bytes: int) -> None:
        self.copied = torch.zeros(max(num_elements, 1), dtype=torch.bfloat16)
        self.prepared = torch.zeros(max(prepared_bytes, 1), dtype=torch.uint8)
        self.copied_handle, self.copied_descriptor = engine.register_tensor(self.copied)
        self.prepared_handle, _ = engine.register_tensor(self.prepared)

    @property
    def num_bytes(self) -> int:
        return self.copied.nbytes + self.prepared.nbytes


@dataclass(frozen=True)
class Work:
    """One group on its way through the stages."""

    rank_group: RankGroup
    slot: Slot


@dataclass(frozen=True)
class Stage:
    """A step that each group goes through, one group at a time."""

    name: str
    run: Callable[[Work], None]


class Pipeline:
    """Runs groups through the stages. The first failure ends all of them, and is raised by send()."""

    def __init__(self, stages: Sequence[Stage], slots: Sequence[Slot]) -> None:
        self._slots, self._free = slots, threading.Semaphore(len(slots))
        self._queues: list[queue.Queue[Work | None]] = [queue.Queue() for _ in range(len(stages) + 1)]
        self._failure = ""
        self._has_failed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(idx, stage), name=stage.name, daemon=True)
            for idx, stage in enumerate(stages)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, groups: Sequence[RankGroup]) -> None:
        """Returns when all groups are through the last stage. Raises TransferError for the first failure."""
        for number, group in enumerate(groups):  # they end in their order, so the slots become free in theirs
            self._queues[0].put(Work(group, self._slots[number % len(self._slots)]))
        for _ in groups:
            if self._queues[-1].get() is None:
                break
        self.raise_failure()

    def fail(self, why: str) -> None:
        """Ends all stages, as when a peer is lost."""
        self._failure = self._failure or why
        self._has_failed.set()
        self.stop()

    def raise_failure(self) -> None:
        if self._has_failed.is_set():
            raise TransferError(self._failure)

    def wait(self, counter: ImmCounter, count: int) -> None:
        """Waits for immediates, unless a peer is lost meanwhile."""
        until = time.monotonic() + LIMIT_S
        while True:
            self.raise_failure()
            try:
                return counter.wait(count, _ASK_S)
            except TransferError:
                if time.monotonic() > until:
                    raise

    def stop(self) -> None:
        self._free.release()
        for each in self._queues:
            each.put(None)

    def _run(self, idx: int, stage: Stage) -> None:
        torch.set_num_threads(1)
        while (work := self._queues[idx].get()) is not None:
            if idx == 0:
                self._free.acquire()
            try:
                self.raise_failure()
                with tracekern.range(f"{stage.name} {work.rank_group.group.name}"):
                    stage.run(work)
            except Exception as error:  # noqa: BLE001 - send() raises it
                self.fail(str(error))
                return
            if idx + 1 == len(self._threads):
                self._free.release()
            self._queues[idx + 1].put(work)


def copy_shard(storage: torch.Tensor, first: int, work: Work) -> None:
    """Stage 1: from where training keeps its parameters (with a GPU: from the host to the device)."""
    num_elements = work.rank_group.num_elements
    work.slot.copied[:num_elements].copy_(storage[first : first + num_elements])


def prepare(block: int, work: Work) -> None:
    """Stage 2: cuts the copied rows into pieces, in the order of the writes; from bf16 to fp8 with scales."""
    prepared = work.slot.prepared
    for piece in work.rank_group.pieces:
        rows, cols = slice(*piece.rows), slice(*piece.cols)
        first = piece.shard + rows.start * piece.width
        held = work.slot.copied[first : first + (rows.stop - rows.start) * piece.width].view(-1, piece.width)[:, cols]
        target = prepared[piece.values : piece.values + piece.value_bytes]
        if piece.is_fp8:
            values, scales = quantize(held.contiguous(), block)
            target.view(FP8).view(values.shape).copy_(values)
            prepared[piece.scales : piece.scales + piece.scale_bytes].view(torch.float32).view_as(scales).copy_(scales)
        else:
            target.view(torch.bfloat16).view(held.shape).copy_(held)


def write_all(
    engine: TransferEngine,
    src: MemoryRegionHandle,
    writes: Sequence[Write],
    targets: Sequence[MemoryRegionDescriptor],
    imm: int | None = None,
) -> None:
    """Stage 3: writes to the ranks' registered memory, and returns when every byte is there."""
    done = DoneCounter()
    for write in writes:
        engine.submit_write(
            src,
            targets[write.rank],
            write.num_bytes,
            src_offset=write.src_offset,
            dst_offset=write.dst_offset,
            imm=imm,
            timeout_s=LIMIT_S,
            on_done=done,
        )
    done.wait(len(writes), LIMIT_S)
