"""The processes of a run: training and inference ranks, and the pipe by which the program that started them asks them.

An inference rank registers its memory, tells where it is, and calls nothing more. That a version has come it sees by
an immediate, if it wants to look; here it looks when it is asked to check every byte.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import tracekern
from examples.weights.model import plain_parts
from examples.weights.stages import LIMIT_S
from examples.weights.ways import VERSION, Options, Way, make_way
from tracekern.fabric import MemoryRegionDescriptor, Net, TransferEngine

Request = tuple[str, Any]
"""A method and its argument. A rank answers ("done", value) or ("failed", why)."""
RECORDS = 1 << 12
"""Room of each track of a traced engine."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs. enter: makes its process part of a host; None: it stays on this one."""

    net: Net
    enter: Callable[[], None] | None = None


@dataclass(frozen=True)
class Run:
    """What all ranks know. command: the line that stands in a capture."""

    options: Options
    run_id: str
    command: str


class Rank:
    """One rank: its engine, its capture if there is one, and the answers to what it is asked."""

    def __init__(self, rank: int, run: Run, net: Net) -> None:
        self.rank, self.run = rank, run
        self.engine = TransferEngine.builder().add_domains([net]).transfer_limit(LIMIT_S).build()
        self._recording = contextlib.ExitStack()

    def lose(self, why: str) -> None:
        """Another rank is lost: what is under way ends."""

    def answer(self, request: str, argument: Any) -> Any:
        return getattr(self, f"on_{request}")(argument)

    def on_record(self, directory: Path) -> None:
        options = self.run.options
        settings = {"provider": options.provider, "through_rank_0": options.through_rank_0 or "no"}
        opened = tracekern.capture(directory, device="cpu", settings=settings, command=self.run.command)
        self._recording.enter_context(self.engine.traced(self._recording.enter_context(opened), RECORDS))

    def on_close(self, argument: None) -> None:
        self._recording.close()

    def stop(self) -> None:
        self._recording.close()
        self.engine.stop()


class TrainingRank(Rank):
    """Has parameters, and brings them to the inference ranks."""

    def __init__(self, rank: int, run: Run, net: Net) -> None:
        super().__init__(rank, run, net)
        self._way: Way = make_way(rank, run.options, self.engine)

    def lose(self, why: str) -> None:
        self._way.fail(why)

    def on_describe(self, argument: None) -> list[MemoryRegionDescriptor]:
        return self._way.descriptors

    def on_connect(self, told: list[list[MemoryRegionDescriptor]]) -> int:
        """Gets the descriptors of all ranks. Returns the bytes that its slots take."""
        num_training = self.run.options.num_training
        self._way.connect(told[:num_training], [memory for (memory,) in told[num_training:]])
        return self._way.slot_bytes

    def on_train(self, version: int) -> None:
        self._way.train(version)

    def on_send(self, version: int) -> None:
        self._way.send(version)

    def stop(self) -> None:
        self._way.stop()
        super().stop()


class InferenceRank(Rank):
    """Has memory that is written to."""

    def __init__(self, rank: int, run: Run, net: Net) -> None:
        super().__init__(rank, run, net)
        self._schedule = run.options.schedule
        self._memory = torch.zeros(self._schedule.num_bytes, dtype=torch.uint8)
        _, self._descriptor = self.engine.register_tensor(self._memory)

    def on_describe(self, argument: None) -> list[MemoryRegionDescriptor]:
        return [self._descriptor]

    def on_look(self, version: int) -> None:
        """Waits until a version is complete: all that write to this rank have said so."""
        writers = 1 if self.run.options.through_rank_0 else self.run.options.num_training
        self.engine.make_imm_counter(VERSION + version).wait(writers, LIMIT_S)

    def on_check(self, version: int) -> int:
        """Returns how many bytes differ from the same computation done plainly."""
        options, wrong = self.run.options, 0
        part = (self.rank - options.num_training) % options.num_parts
        for weight in (weight for group in options.model.groups for weight in group.weights):
            place = self._schedule.places[weight.name]
            values, scales = plain_parts(weight, version, options.block, options.num_parts)[part]
            for wanted, at in ((values, place.values), (scales, place.scales)):
                packed = wanted.contiguous().view(-1).view(torch.uint8)
                wrong += int((self._memory[at : at + len(packed)] != packed).sum())
        return wrong


def be_rank(rank: int, run: Run, place: Place, pipe: Connection) -> None:
    """Answers requests until there are no more. Runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that started the ranks, which ends them
    if place.enter is not None:
        place.enter()
    torch.set_num_threads(1)
    num_ranks = run.options.num_training + run.options.num_inference
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), TRACEKERN_RUN_ID=run.run_id)
    kind = TrainingRank if rank < run.options.num_training else InferenceRank
    made = kind(rank, run, place.net)
    requests: queue.Queue[Request | None] = queue.Queue()
    threading.Thread(target=_listen, args=(made, pipe, requests), daemon=True).start()
    while (request := requests.get()) is not None:
        try:
            answer = "done", made.answer(*request)
        except Exception as error:  # noqa: BLE001 - who asked tells it
            answer = "failed", f"{type(error).__name__}: {error}"
        pipe.send(answer)
    made.stop()


def _listen(made: Rank, pipe: Connection, requests: queue.Queue[Request | None]) -> None:
    """Passes requests on, and ends what is under way when another rank is lost or nobody asks any more."""
    try:
        while True:
            request, argument = pipe.recv()
            if request == "stop":
                break
            if request == "lost":
                made.lose(argument)
            else:
                requests.put((request, argument))
    except (EOFError, OSError):
        made.lose("the program that started the ranks has ended")
    requests.put(None)
