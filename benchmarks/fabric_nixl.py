"""The transfer engine beside NIXL, tcp beside tcp: the same requests, from Python on both sides. See fabric.py.

A request is one write, or one of 256 pages, with a notification (NIXL) or an immediate a write (the engine). What is
timed is one request at a time, from the call that posts it until the sender is told that it is done; what NIXL can
prepare, its lists of descriptors and the request itself, is prepared. Each system runs in two processes of its own, on
the same two cores; the systems take turns, and NIXL runs with its progress thread and without it. The receiver gets
every notification, and compares the bytes of every case.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from harness import Table, about_network

KiB, MiB = 1 << 10, 1 << 20
MEMORY_BYTES = 64 * MiB
LIMIT_S = 120.0
VERSION = "1.5.1"
HOW = f"pip install --no-deps --target NIXL nixl-cu12=={VERSION}, then benchmarks/fabric.py --nixl NIXL"
COLUMNS = ["case", "", "NIXL", "its way", "engine", "", "NIXL / engine", "least..most", "goal", ""]
SYSTEMS = ("engine", "nixl", "nixl_thread")
GOAL = 1.0


@dataclass(frozen=True)
class Request:
    """`count` writes of so many bytes each, `turns` times."""

    name: str
    bytes: int
    count: int
    turns: int

    @property
    def places(self) -> list[int]:
        """Returns the target's page for each page of the source, in no order, as in a cache."""
        return random.Random(1).sample(range(self.count), self.count)


REQUESTS = (
    Request("256 x 1 KiB", KiB, 256, 100),
    Request("256 x 4 KiB", 4 * KiB, 256, 100),
    Request("256 x 64 KiB", 64 * KiB, 256, 40),
    Request("1 MiB", MiB, 1, 200),
    Request("16 MiB", 16 * MiB, 1, 30),
    Request("32 MiB", 32 * MiB, 1, 20),
)


class Side(Protocol):
    """One process of a system."""

    def describe(self) -> Any: ...
    def meet(self, other: Any) -> None: ...
    def prepare(self, request: Request) -> Callable[[], None]:
        """Returns what posts it and returns when it is done."""

    def arrive(self, request: Request) -> None:
        """Returns when the notifications of `turns` requests have come."""


class EngineSide:
    def __init__(self, memory: np.ndarray) -> None:
        from tracekern.fabric import Net, TransferEngine

        self.engine = TransferEngine.builder().add_domains([Net("tcp", "127.0.0.1")]).build()
        self.src, self.own = self.engine.register_memory(memory.ctypes.data, memory.nbytes, memory)
        self.counter = self.engine.make_imm_counter(1)

    def describe(self) -> Any:
        return self.own

    def meet(self, other: Any) -> None:
        self.dst = other

    def prepare(self, request: Request) -> Callable[[], None]:
        from tracekern.fabric import DoneFlag, PageIndices

        pages = PageIndices(range(request.count), request.bytes)
        places = PageIndices(request.places, request.bytes)

        def run() -> None:
            done = DoneFlag()
            if request.count == 1:
                self.engine.submit_write(self.src, self.dst, request.bytes, imm=1, on_done=done)
            else:
                self.engine.submit_paged_writes(self.src, pages, self.dst, places, request.bytes, imm=1, on_done=done)
            done.wait(LIMIT_S)

        return run

    def arrive(self, request: Request) -> None:
        for _ in range(request.turns):
            self.counter.wait(request.count, LIMIT_S)


class NixlSide:
    def __init__(self, memory: np.ndarray, has_thread: bool) -> None:
        os.environ["UCX_TLS"] = "tcp,cuda_copy"  # the latter for NIXL, which refuses to start without it beside a GPU
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.has_thread = has_thread
        self.at = memory.ctypes.data
        config = nixl_agent_config(has_thread, False, 0, backends=["UCX"])
        self.agent = nixl_agent(str(os.getpid()), config)
        self.agent.register_memory([(self.at, memory.nbytes, 0, "")], "DRAM")

    def describe(self) -> Any:
        return self.agent.get_agent_metadata(), self.at

    def meet(self, other: Any) -> None:
        metadata, self.there = other
        peer = self.agent.add_remote_agent(metadata)
        self.peer = peer.decode() if isinstance(peer, bytes) else peer

    def prepare(self, request: Request) -> Callable[[], None]:
        def listed(base: int, places: Iterable[int]) -> Any:
            return self.agent.get_xfer_descs([(base + i * request.bytes, request.bytes, 0) for i in places], "DRAM")

        src, dst = listed(self.at, range(request.count)), listed(self.there, request.places)
        handle = self.agent.initialize_xfer("WRITE", src, dst, self.peer, b"written")

        def run() -> None:
            state = self.agent.transfer(handle)
            while state != "DONE":
                state = self.agent.check_xfer_state(handle)
                if state == "ERR":
                    raise RuntimeError(f"NIXL: {request.name} has failed")

        return run

    def arrive(self, request: Request) -> None:
        come, until = 0, time.monotonic() + LIMIT_S
        while come < request.turns:
            come += sum(map(len, self.agent.get_new_notifs().values()))
            if time.monotonic() > until:
                raise RuntimeError(f"NIXL: {come} of {request.turns} notifications of {request.name} have come")
            if self.has_thread:
                time.sleep(1e-4)


def make_side(system: str, memory: np.ndarray) -> Side:
    return EngineSide(memory) if system == "engine" else NixlSide(memory, system == "nixl_thread")


def be_side(system: str, is_source: bool, nixl: str, requests: tuple[Request, ...], other: Connection) -> None:
    """One of two processes. The source sends the seconds of all turns to `other` at the end, the target to nobody."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0 if is_source else -1]})
    sys.path.append(nixl)
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    side = make_side(system, memory)
    other.send(side.describe())
    side.meet(other.recv())
    for number, request in enumerate(requests, 1):
        if is_source:
            other.send(time_turns(side, request, memory, number))
            other.recv()
        else:
            side.arrive(request)
            seconds = other.recv()
            written = memory[: request.bytes * request.count]
            other.send(seconds if (written == number).all() else None)


def time_turns(side: Side, request: Request, memory: np.ndarray, value: int) -> list[float]:
    memory[:] = value
    run, seconds = side.prepare(request), []
    for _ in range(request.turns):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return seconds


def run_system(system: str, nixl: str, requests: tuple[Request, ...]) -> list[float]:
    """Returns the median seconds of each request."""
    context = multiprocessing.get_context("spawn")
    here, there = zip(context.Pipe(), context.Pipe(), strict=True)
    sides = [context.Process(target=be_side, args=(system, i == 0, nixl, requests, there[i])) for i in range(2)]
    for side in sides:
        side.start()
    for end in there:
        end.close()
    try:
        return pass_on(here, system, requests)
    finally:
        for side in sides:
            side.join(10)
            side.kill()


def pass_on(pipes: tuple[Connection, Connection], system: str, requests: tuple[Request, ...]) -> list[float]:
    """Stands between both sides."""

    def take(side: int) -> Any:
        if pipes[side].poll(LIMIT_S):
            with contextlib.suppress(EOFError):  # it has ended
                return pipes[side].recv()
        raise SystemExit(f"fabric_nixl: nothing was heard from {system}'s {('source', 'target')[side]}; run it again")

    described = take(0), take(1)
    pipes[0].send(described[1])
    pipes[1].send(described[0])
    medians = []
    for request in requests:
        pipes[1].send(take(0))
        seconds = take(1)
        if seconds is None:
            raise SystemExit(f"fabric_nixl: {system}: not all bytes of {request.name} have arrived")
        pipes[0].send("go on")
        medians.append(statistics.median(seconds))
    return medians


def measure(nixl: str, pairs: int, requests: tuple[Request, ...] = REQUESTS) -> list[dict[str, Any]]:
    """Returns a row a request. nixl: the folder where it is installed; "" where it is not: the rows say so."""
    if not nixl:
        return [{**about_network("tcp", "not run"), "case": request.name, "how": HOW} for request in requests]
    if not (Path(nixl) / "nixl_cu12").is_dir():
        raise SystemExit(f"fabric: --nixl {nixl}: has no nixl_cu12; {HOW}")
    found: dict[str, list[list[float]]] = {system: [] for system in SYSTEMS}
    for pair in range(pairs):
        for system in sorted(SYSTEMS, reverse=pair % 2 == 0):
            found[system].append(run_system(system, nixl, requests))
    return [
        row_of(request, {name: [run[i] for run in found[name]] for name in SYSTEMS})
        for i, request in enumerate(requests)
    ]


def row_of(request: Request, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """The engine beside that of NIXL's two ways which is faster for this request."""
    way = min(SYSTEMS[1:], key=lambda name: statistics.median(seconds[name]))
    ratios = [nixl / engine for nixl, engine in zip(seconds[way], seconds["engine"], strict=True)]
    return {
        **about_network("tcp"),
        "case": request.name,
        "bytes": request.bytes * request.count,
        **{f"{name}_us": [1e6 * one for one in seconds[name]] for name in SYSTEMS},
        "nixl_way": way,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "goal": GOAL,
        "is_reached": statistics.median(ratios) >= GOAL,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(f"the engine and NIXL {VERSION} over tcp, interleaved", COLUMNS)
    for row in rows:
        if row["status"] != "run":
            table.add(row["case"], row["status"], *("" for _ in COLUMNS[2:]))
            continue
        engine, nixl = (statistics.median(row[f"{name}_us"]) for name in ("engine", row["nixl_way"]))
        table.add(
            row["case"],
            row["status"],
            f"{nixl:.0f} us",
            "thread" if row["nixl_way"] == "nixl_thread" else "no thread",
            f"{engine:.0f} us",
            f"{row['bytes'] / engine / 1e3:.2f} GB/s",
            f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}",
            f">= {row['goal']:.2f}",
            "" if row["is_reached"] else "missed",
        )
    table.print()
    if any(row["status"] != "run" for row in rows):
        print(f"  to run it: {HOW}")
