"""Runs a function as resident ranks (comm/ranks/resident.py): threads, each with a stream of its own on a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from tracekern.comm.ranks.resident import Residents
from tracekern.launcher.status import exit_status

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_POLL_S = 0.1


def run_residents(num_ranks: int, function: Callable[[], Any]) -> int:
    """Runs the function on each rank. Returns the first exit status that is not 0: an int that it returned, or 1 where
    it raised.

    Raises KeyboardInterrupt once all ranks have ended, if Ctrl-C came.
    """
    # A queue of the device for each stream: no rank's work is behind that of another one.
    os.environ.setdefault(_QUEUES, "32")
    import torch  # by one thread: of several at once some would find half of it

    residents = Residents(num_ranks)
    statuses, has_gpu = [0] * num_ranks, torch.cuda.is_available()

    def run(rank: int) -> None:
        # A stream of torch's pool; on the default one kernels of all ranks would run one after the other.
        own = torch.cuda.Stream() if has_gpu else None  # type: ignore[no-untyped-call]
        with residents.as_rank(rank), torch.cuda.stream(own):
            statuses[rank] = exit_status(function, f"rank {rank}: ")

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    was_interrupted = False
    while any(thread.is_alive() for thread in threads):
        try:
            for thread in threads:
                thread.join(_POLL_S)
        except KeyboardInterrupt:
            was_interrupted = True
            residents.interrupt()
    if was_interrupted:
        raise KeyboardInterrupt
    return next((status for status in statuses if status), 0)
