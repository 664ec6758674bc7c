"""Rank processes that stay up between tests: start once, call functions on all ranks, get their results by rank."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
PRELOADED = ["torch", "torch.distributed", "numpy.random", "tracekern._core", "tracekern.comm.ranks.group"]


class RankFailed(AssertionError):
    """A rank raised; the message holds every rank's traceback."""


class RankPool:
    """num_ranks processes with a gloo group among them. call() runs a module-level function on each."""

    def __init__(self, num_ranks: int) -> None:
        self._directory = tempfile.TemporaryDirectory()
        # All ranks of all pools are forks of one process that has imported torch, and has done nothing else.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes, self._processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            rendezvous = f"file://{Path(self._directory.name) / 'rendezvous'}"
            process = context.Process(target=_serve, args=(rank, num_ranks, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """[num_ranks] results of function(group, *args). Raises RankFailed when any rank raised or did not answer."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [self._answer(rank, pipe) for rank, pipe in enumerate(self._pipes)]
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise RankFailed("\n".join(failures))
        return [result for _, result in answers]

    @staticmethod
    def _answer(rank: int, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pipe.recv() if pipe.poll(TIMEOUT_S) else (False, f"no answer in {TIMEOUT_S:.0f} s")
        except EOFError:
            return False, "the process is gone"

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
        self._directory.cleanup()


def _serve(rank: int, num_ranks: int, rendezvous: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from tracekern.comm.ranks.group import Group

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    group = Group.discover()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(group, *args)))
        except BaseException:  # noqa: BLE001 - a test process reports whatever happens
            pipe.send((False, traceback.format_exc()))
