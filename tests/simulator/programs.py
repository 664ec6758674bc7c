"""What each warp does, by shape."""

from __future__ import annotations

from collections.abc import Callable

from simulator.cases import Case, Shape
from simulator.engine import Launch, Meet, Program, Signal, Wait, Warp, Work


def programs_of(case: Case) -> dict[Warp, Program]:
    """One program for each warp."""
    num_warps = case.num_ranks - 1 if case.shape is Shape.EXCHANGE else 1
    write = _SHAPES[case.shape]
    return {(rank, warp): write(case, rank, warp) for rank in range(case.num_ranks) for warp in range(num_warps)}


def _launch(case: Case, name: str, iteration: int, is_first: bool = True) -> Program:
    """A kernel of its own, or nothing behind the first in a persistent one."""
    if not case.is_persistent or (iteration == 0 and is_first):
        yield Launch("persistent" if case.is_persistent else name, iteration, is_first)


def _meeting(case: Case, iteration: int) -> Program:
    """A barrier of all ranks."""
    for peer in range(case.num_ranks):
        yield Signal("meeting", peer, iteration, iteration)
    yield Wait("meeting", -1, iteration, iteration)


def _stream(case: Case, rank: int, warp: int) -> Program:
    for iteration in range(case.iterations):
        yield from _launch(case, "stage", iteration)
        if rank > 0:
            yield Wait("token", rank - 1, iteration, iteration)
        yield Work("compute", iteration, case.work_ns)
        if rank < case.num_ranks - 1:
            yield Signal("token", rank + 1, iteration, iteration)


def _chain(case: Case, rank: int, warp: int) -> Program:
    for iteration in range(case.iterations):
        yield from _launch(case, "stage", iteration)
        if rank > 0:
            yield Wait("token", rank - 1, iteration, iteration)
        yield Work("compute", iteration, case.work_ns)
        if rank < case.num_ranks - 1:
            yield Signal("token", rank + 1, iteration, iteration)
        yield from _launch(case, "finish", iteration, is_first=False)
        yield from _meeting(case, iteration)


def _ring(case: Case, rank: int, warp: int) -> Program:
    num_ranks = case.num_ranks
    for iteration in range(case.iterations):
        yield from _launch(case, "step", iteration)
        yield Work("compute", iteration, case.work_ns)
        yield Signal("token", (rank + 1) % num_ranks, iteration, iteration)
        yield Wait("token", (rank - 1) % num_ranks, iteration, iteration)


def _credits(case: Case, rank: int, warp: int) -> Program:
    last = case.num_ranks - 1
    for iteration in range(case.iterations):
        yield from _launch(case, "stage", iteration)
        if rank > 0:
            yield Wait("token", rank - 1, iteration, iteration)
        yield Work("compute", iteration, case.work_ns)
        if rank > 0:
            yield Signal("room", rank - 1, iteration + 1, iteration)
        if rank < last:
            if iteration >= case.window:
                yield Wait("room", rank + 1, iteration + 1 - case.window, iteration)
            yield Signal("token", rank + 1, iteration, iteration)


def _exchange(case: Case, rank: int, warp: int) -> Program:
    peer = (rank + 1 + warp) % case.num_ranks
    for iteration in range(case.iterations):
        for number, half in enumerate(("dispatch", "combine")):
            slot = 2 * iteration + number
            yield from _launch(case, f"{half}_send", iteration, number == 0)
            yield Work("copy_token", iteration, case.work_ns / 4)
            yield Signal("token", peer, slot, iteration)
            yield from _launch(case, f"{half}_recv", iteration, is_first=False)
            if case.is_persistent:
                yield Meet(2 * slot, iteration)
            yield Wait("token", peer, slot, iteration)
            yield Work("compute", iteration, case.work_ns / 4)
            if case.is_persistent:
                yield Meet(2 * slot + 1, iteration)


def _barrier(case: Case, rank: int, warp: int) -> Program:
    for iteration in range(case.iterations):
        yield from _launch(case, "step", iteration)
        yield Work("compute", iteration, case.work_ns)
        yield from _meeting(case, iteration)


_SHAPES: dict[Shape, Callable[[Case, int, int], Program]] = {
    Shape.CHAIN: _chain,
    Shape.STREAM: _stream,
    Shape.RING: _ring,
    Shape.CREDITS: _credits,
    Shape.EXCHANGE: _exchange,
    Shape.BARRIER: _barrier,
}
