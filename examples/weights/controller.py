"""Starts the ranks, tells them once where everybody's memory is, and asks them to train, send and check versions."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from examples.weights.ranks import Place, Run, be_rank
from examples.weights.stages import LIMIT_S
from examples.weights.ways import Options
from tracekern import TracekernError
from tracekern.fabric import Net

_NETS = {"tcp": Net("tcp", "127.0.0.1"), "shm": Net("shm", "")}
_PRELOADED = ["torch", "tracekern.fabric", "tracekern.record.session"]
_GRACE_S = 5.0
"""How long ranks have to end after one is lost, and how long that one may take to be seen dead."""


class RanksLost(TracekernError):
    """One rank has ended or failed, and so have the others."""


class Ranks:
    """All ranks of a run, as a context: `with Ranks(options) as ranks: ranks.send(1)`."""

    def __init__(self, options: Options, places: Sequence[Place] | None = None, command: str = "") -> None:
        """places: where each rank runs; None: all of them on this host."""
        self.options = options
        self._num_ranks = options.num_training + options.num_inference
        self._places = places or [Place(_NETS[options.provider])] * self._num_ranks
        self._run = Run(options, f"{os.getpid()}-{secrets.token_hex(4)}", command)
        self.processes: list[ForkServerProcess] = []
        self._pipes: list[connection.Connection] = []
        self.slot_bytes: list[int] = []
        """That the slots of each training rank take."""

    def __enter__(self) -> Ranks:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many ranks as cores, or more
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        for rank, place in enumerate(self._places):
            here, there = context.Pipe()
            process = context.Process(target=be_rank, args=(rank, self._run, place, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)
        try:
            told = self.ask("describe")
            self.slot_bytes = self.ask("connect", told, self._training)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def name(self, rank: int) -> str:
        num_training = self.options.num_training
        return f"training rank {rank}" if rank < num_training else f"inference rank {rank - num_training}"

    # ---- a version ----

    def train(self, version: int) -> None:
        """Puts a version's parameters where training keeps them."""
        self.ask("train", version, self._training)

    def send(self, version: int) -> float:
        """Returns the seconds from the first copy until the version is complete at all inference ranks."""
        began = time.perf_counter()
        self.ask("send", version, self._training)
        seconds = time.perf_counter() - began
        self.ask("look", version, self._inference)
        return seconds

    def check(self, version: int) -> int:
        """Returns how many bytes of all inference ranks are not those of the version."""
        return sum(self.ask("check", version, self._inference))

    def record(self, directory: Path) -> None:
        """Opens a capture on all ranks, in one directory."""
        self.ask("record", directory)

    def close(self) -> None:
        """Closes it."""
        self.ask("close")

    # ---- requests ----

    def ask(self, request: str, argument: Any = None, ranks: Sequence[int] | None = None) -> list[Any]:
        """Asks ranks, None: all, and returns their answers. Raises RanksLost where one ends or fails."""
        asked = list(range(self._num_ranks) if ranks is None else ranks)
        self.post(request, argument, asked)
        return self.collect(request, asked)

    def post(self, request: str, argument: Any, ranks: Sequence[int]) -> None:
        for rank in ranks:
            try:
                self._pipes[rank].send((request, argument))
            except OSError:
                raise self._lost(request, f"{self.name(rank)} takes no requests") from None

    def collect(self, request: str, ranks: Sequence[int]) -> list[Any]:
        """Returns the answers to what was posted."""
        answers: dict[int, Any] = {}
        until = time.monotonic() + 2 * LIMIT_S
        while len(answers) < len(ranks):
            waiting = [rank for rank in ranks if rank not in answers]
            sources: list[Any] = [self._pipes[rank] for rank in waiting]
            connection.wait([*sources, *(process.sentinel for process in self.processes)], until - time.monotonic())
            if self._dead() or time.monotonic() > until:
                raise self._lost(request, f"{self.name(waiting[0])} has not answered within {2 * LIMIT_S:g} s")
            for rank in waiting:
                try:
                    if not self._pipes[rank].poll():
                        continue
                    outcome, answers[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):  # its pipe closes before the process has ended
                    outcome, answers[rank] = "failed", "it answers no more"
                if outcome == "failed":
                    raise self._lost(request, f"{self.name(rank)} failed: {answers[rank]}")
        return [answers[rank] for rank in ranks]

    def stop(self) -> None:
        """Ends all ranks, those that do not follow by force."""
        self._tell("stop", None)
        until = time.monotonic() + _GRACE_S
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    @property
    def _training(self) -> list[int]:
        return list(range(self.options.num_training))

    @property
    def _inference(self) -> list[int]:
        return list(range(self.options.num_training, self._num_ranks))

    def _tell(self, request: str, argument: Any) -> None:
        for pipe in self._pipes:
            try:
                pipe.send((request, argument))
            except OSError:
                continue  # that rank has ended

    def _dead(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if not process.is_alive()]

    def _lost(self, request: str, why: str) -> RanksLost:
        """Ends the others, and returns the line that says which rank was the first, and how it ended."""
        until = time.monotonic() + 1.0
        while not self._dead() and time.monotonic() < until:  # a rank may see that another one is dead before this one
            time.sleep(0.01)
        dead = self._dead()
        if dead:
            why = "; ".join(f"{self.name(rank)} {_how(self.processes[rank].exitcode)}" for rank in dead)
        self._tell("lost", why)
        self.stop()
        return RanksLost(f"{why}, during {request!r}; the other ranks have ended")


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed ({signal.Signals(-exit_code).name})"
    return f"ended with exit code {exit_code}"
