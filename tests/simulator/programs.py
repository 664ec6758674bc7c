"""What each warp does, by shape."""

from __future__ import annotations

from collections.abc import Callable

from simulator.cases import Case, Shape
from simulator.engine import Launch, Meet, Pause, Program, Signal, Wait, Warp, Work

_MOST_TO_SIGNAL = 32
"""Of more ranks, all to all would be most of what is simulated."""


def programs_of(case: Case) -> dict[Warp, Program]:
    """One program for each warp."""
    num_warps = case.num_warps or (case.num_ranks - 1 if case.shape is Shape.EXCHANGE else 1)
    write = _SHAPES[case.shape]
    return {(rank, warp): write(case, rank, warp) for rank in range(case.num_ranks) for warp in range(num_warps)}


def _launch(case: Case, name: str, iteration: int, is_first: bool = True) -> Program:
    """A kernel of its own, or nothing behind the first in a persistent one."""
    if not case.is_persistent or (iteration == 0 and is_first):
        yield Launch("persistent" if case.is_persistent else name, iteration, is_first)


def _meeting(case: Case, rank: int, iteration: int) -> Program:
    """A barrier: of few ranks each signals all, of many each hears of twice as many in every round."""
    if case.num_ranks <= _MOST_TO_SIGNAL:
        for peer in range(case.num_ranks):
            yield Signal("meeting", peer, iteration, iteration)
        yield Wait("meeting", -1, iteration, iteration)
        return
    num_rounds = (case.num_ranks - 1).bit_length()
    for round_idx in range(num_rounds):
        slot, distance = iteration * num_rounds + round_idx, 1 << round_idx
        yield Signal("count", (rank + distance) % case.num_ranks, slot, iteration)
        yield Wait("count", (rank - distance) % case.num_ranks, slot, iteration)


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
        yield from _meeting(case, rank, iteration)


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
            if iteration >= case.window and case.has_room:
                yield Pause(iteration, case.see_ns)
            elif iteration >= case.window:
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
        if case.pause_ns:
            yield Pause(iteration, case.pause_ns)
        yield Work("compute", iteration, case.work_ns)
        yield from _meeting(case, rank, iteration)


def _pipeline(case: Case, rank: int, warp: int) -> Program:
    """Warp w of a rank sends to rank + 1 + w, and receives from the rank that sends to it."""
    num_ranks, num_warps = case.num_ranks, case.num_warps
    peer, source = (rank + 1 + warp) % num_ranks, (rank - 1 - warp) % num_ranks
    others = [other for other in range(num_ranks) if other != rank]
    for iteration in range(case.iterations):
        slot = 2 * iteration * num_warps + warp
        tokens = case.tokens(rank, warp, iteration)
        yield from _launch(case, "dispatch_send", iteration)
        yield from _tokens(case, "copy_token", iteration, tokens)
        if warp == 0:
            for other in others:
                yield Signal("count", other, iteration, iteration)
        yield Signal("token", peer, slot, iteration)
        yield from _launch(case, "dispatch_recv", iteration, is_first=False)
        if warp == 0:
            for other in others:
                yield Wait("count", other, iteration, iteration)
        yield Meet(iteration, iteration)
        yield Wait("token", source, slot, iteration)
        yield from _tokens(case, "compute", iteration, tokens)
        yield from _launch(case, "combine_send", iteration, is_first=False)
        yield from _tokens(case, "copy_token", iteration, tokens)
        yield Signal("token", source, slot + num_warps, iteration)
        yield from _launch(case, "combine_recv", iteration, is_first=False)
        yield Wait("token", peer, slot + num_warps, iteration)
        yield from _tokens(case, "compute", iteration, tokens)


def _tokens(case: Case, event: str, iteration: int, count: int) -> Program:
    for _ in range(count):
        if case.pause_ns:
            yield Pause(iteration, case.pause_ns / 8)
        yield Work(event, iteration, case.work_ns / 8)


_SHAPES: dict[Shape, Callable[[Case, int, int], Program]] = {
    Shape.CHAIN: _chain,
    Shape.STREAM: _stream,
    Shape.RING: _ring,
    Shape.CREDITS: _credits,
    Shape.EXCHANGE: _exchange,
    Shape.BARRIER: _barrier,
    Shape.PIPELINE: _pipeline,
}
