"""What each warp does, by shape."""

from __future__ import annotations

from collections.abc import Callable

from simulator.cases import Case, Shape
from simulator.engine import Launch, Meet, Pause, Program, Signal, Wait, Warp, Work

_MOST_TO_SIGNAL = 32
"""With more ranks, signals from all to all would be most of what is simulated."""


def programs_of(case: Case) -> dict[Warp, Program]:
    """One program for each warp."""
    usual = {Shape.EXCHANGE: case.num_ranks - 1, Shape.STREAMS: 2}.get(case.shape, 1)
    write = _SHAPES[case.shape]
    return {
        Warp(rank, warp, stream=int(case.shape is Shape.STREAMS and warp == 1)): write(case, rank, warp)
        for rank in range(case.num_ranks)
        for warp in range(case.num_warps or usual)
    }


def _launch(case: Case, rank: int, name: str, iteration: int, is_first: bool = True) -> Program:
    """A kernel of its own, or nothing behind the first in a persistent one."""
    if case.is_persistent:
        if iteration == 0 and is_first:
            yield Launch("persistent", iteration)
        return
    extra_ns = sum(entry.extra_ns(rank, iteration) for entry in case.injections) if is_first else 0
    if extra_ns:
        yield Launch("extra", iteration, is_injected=True)
        yield Work("compute", iteration, extra_ns, is_injected=True)
    yield Launch(name, iteration, is_first and not extra_ns)


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
        yield from _launch(case, rank, "stage", iteration)
        if rank > 0:
            yield Wait("token", rank - 1, iteration, iteration)
        yield Work("compute", iteration, case.work_ns)
        if rank < case.num_ranks - 1:
            yield Signal("token", rank + 1, iteration, iteration)


def _chain(case: Case, rank: int, warp: int) -> Program:
    for iteration in range(case.iterations):
        yield from _launch(case, rank, "stage", iteration)
        if rank > 0:
            yield Wait("token", rank - 1, iteration, iteration)
        yield Work("compute", iteration, case.work_ns)
        if rank < case.num_ranks - 1:
            yield Signal("token", rank + 1, iteration, iteration)
        yield from _launch(case, rank, "finish", iteration, is_first=False)
        yield from _meeting(case, rank, iteration)


def _ring(case: Case, rank: int, warp: int) -> Program:
    num_ranks = case.num_ranks
    for iteration in range(case.iterations):
        yield from _launch(case, rank, "step", iteration)
        yield Work("compute", iteration, case.work_ns)
        yield Signal("token", (rank + 1) % num_ranks, iteration, iteration)
        yield Wait("token", (rank - 1) % num_ranks, iteration, iteration)


def _credits(case: Case, rank: int, warp: int) -> Program:
    last = case.num_ranks - 1
    for iteration in range(case.iterations):
        yield from _launch(case, rank, "stage", iteration)
        if rank > 0:
            yield Wait("token", rank - 1, iteration, iteration)
        yield Work("compute", iteration, case.work_ns)
        if rank > 0:
            yield Signal("room", rank - 1, iteration + 1, iteration)
        if rank < last:
            if case.slots and iteration >= case.slots:
                yield Wait("room", rank + 1, iteration + 1 - case.slots, iteration)
            else:
                yield Pause(iteration, case.see_ns)
            yield Signal("token", rank + 1, iteration, iteration)


def _exchange(case: Case, rank: int, warp: int) -> Program:
    peer = (rank + 1 + warp) % case.num_ranks
    for iteration in range(case.iterations):
        for number, half in enumerate(("dispatch", "combine")):
            slot = 2 * iteration + number
            yield from _launch(case, rank, f"{half}_send", iteration, number == 0)
            yield Work("copy_token", iteration, case.work_ns / 4)
            yield Signal("token", peer, slot, iteration)
            yield from _launch(case, rank, f"{half}_recv", iteration, is_first=False)
            if case.is_persistent:
                yield Meet(2 * slot, iteration)
            yield Wait("token", peer, slot, iteration)
            yield Work("compute", iteration, case.work_ns / 4)
            if case.is_persistent:
                yield Meet(2 * slot + 1, iteration)


def _barrier(case: Case, rank: int, warp: int) -> Program:
    for iteration in range(case.iterations):
        yield from _launch(case, rank, "step", iteration)
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
        more = sum(entry.more_pieces(rank, iteration) for entry in case.injections)
        tokens = case.tokens(rank, warp, iteration), more
        yield from _launch(case, rank, "dispatch_send", iteration)
        yield from _tokens(case, "copy_token", iteration, *tokens)
        if warp == 0:
            for other in others:
                yield Signal("count", other, iteration, iteration)
        yield Signal("token", peer, slot, iteration)
        yield from _launch(case, rank, "dispatch_recv", iteration, is_first=False)
        if warp == 0:
            for other in others:
                yield Wait("count", other, iteration, iteration)
        yield Meet(iteration, iteration)
        yield Wait("token", source, slot, iteration)
        yield from _tokens(case, "compute", iteration, *tokens)
        yield from _launch(case, rank, "combine_send", iteration, is_first=False)
        yield from _tokens(case, "copy_token", iteration, *tokens)
        yield Signal("token", source, slot + num_warps, iteration)
        yield from _launch(case, rank, "combine_recv", iteration, is_first=False)
        yield Wait("token", peer, slot + num_warps, iteration)
        yield from _tokens(case, "compute", iteration, *tokens)


def _tokens(case: Case, event: str, iteration: int, count: int, more: int) -> Program:
    for number in range(count + more):
        if case.pause_ns:
            yield Pause(iteration, case.pause_ns / 8, number >= count)
        yield Work(event, iteration, case.work_ns / 8, number >= count)


def _streams(case: Case, rank: int, warp: int) -> Program:
    for iteration in range(case.iterations):
        if warp == 1:
            yield Launch("experts", iteration, is_first=False, after=2 * iteration)
            yield Work("compute", iteration, case.work_ns)
            continue
        yield from _launch(case, rank, "exchange", iteration)
        yield Work("copy_token", iteration, case.work_ns / 2)
        yield Signal("token", (rank + 1) % case.num_ranks, iteration, iteration)
        yield Wait("token", (rank - 1) % case.num_ranks, iteration, iteration)
        yield Launch("merge", iteration, is_first=False, after=iteration + 1)
        yield Work("compute", iteration, case.work_ns / 4)


_SHAPES: dict[Shape, Callable[[Case, int, int], Program]] = {
    Shape.CHAIN: _chain,
    Shape.STREAM: _stream,
    Shape.RING: _ring,
    Shape.CREDITS: _credits,
    Shape.EXCHANGE: _exchange,
    Shape.BARRIER: _barrier,
    Shape.PIPELINE: _pipeline,
    Shape.STREAMS: _streams,
}
