"""A program for test_on_error.py, on ranks of torch.distributed as torchrun starts them: CASE says what fails."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from datetime import timedelta

import torch.distributed as dist

import tracekern
from tests.sessions import launch
from tracekern.comm.devices.device import HostClock, HostDevice

OWN_EXIT = 7
LIMIT_S = 3
IN_VAIN = ("never comes", "no gpu", "stopped clock", "killed")
"""Cases in which a rank waits for the other to the end of that limit."""


class StoppedClock(HostClock):
    def read_brackets(self, count: int):
        raise RuntimeError("the clock cannot be read")


class OwnClock(HostDevice):
    """A device whose clock no other rank reads, so that ranks exchange messages to relate theirs."""

    def __init__(self, rank: int, is_stopped: bool) -> None:
        super().__init__()
        self.clock = StoppedClock() if is_stopped else HostClock()
        self.clock.id = f"clock of rank {rank}"


def fail() -> None:
    raise ArithmeticError("of a preload function")


def options(case: str, rank: int) -> dict:
    """What the capture of this rank is opened with."""
    if case == "stopped clock":
        return {"device": OwnClock(rank, is_stopped=rank == 1)}
    if rank == 0:
        return {}
    if case == "files":
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 5, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    wrong = {
        "argument": {"every": 0},
        "preload": {"preload": [fail]},
        "no room": {"max_bytes": 1 << 47},
        "no gpu": {"device": "cuda"},
    }
    return wrong.get(case, {})


def in_the_block(case: str, rank: int, capture) -> None:
    if case.startswith("gone"):
        dist.destroy_process_group()
    if case == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if case == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case.endswith("error"):
        raise RuntimeError("of the user")


def main() -> int:
    case, directory = os.environ["CASE"], os.environ["CAPTURE"]
    os.environ["TRACEKERN_RUN_ID"] = os.environ["RUN"]
    del os.environ["TRACEKERN_KEEP_SEGMENT"]  # as under torchrun
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    if case == "no extension" and rank == 1:
        sys.modules["tracekern._core"] = None
    if case == "never comes" and rank == 1:
        time.sleep(LIMIT_S + 1)
        return finish(case)
    with tracekern.capture(directory, on_error=os.environ["ON_ERROR"], **options(case, rank)) as capture:
        sys.stdout.write(f"traced {launch(capture).traced}\n")
        in_the_block(case, rank, capture)
        sys.stdout.write(f"traced {launch(capture).traced}\n")
    return finish(case)


def finish(case: str) -> int:
    """The job goes on with groups of its own."""
    if dist.is_initialized() and case != "killed":
        dist.barrier(dist.new_group())
        dist.destroy_process_group()
    return OWN_EXIT
