"""The calls of one rank queued on its device, each behind a barrier of all ranks there: kernels without their hosts.

Inputs are drawn, memory is allocated and kernels are loaded before the first call that counts, results are checked
behind the last one. While calls run, the host only queues the next ones, and the device starts when they are queued.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tracekern.moe.calls.call import Calls
from tracekern.moe.calls.wire import least_call_us
from tracekern.moe.families import FAMILY_OF
from tracekern.moe.routing import draw_choices
from tracekern.moe.workload.options import MoeRun
from tracekern.record.session import Capture

NUM_WARM_UP = 3
CALLS_AT_ONCE = 64
"""Calls that are queued before the host waits for them. A stream takes some 1,000 launches, then it blocks the host."""
_SLACK = 3.0
"""How much longer than the host needs to queue calls the device is held back. With 1.5 one traced call in a hundred
took as long as its host needs to queue one, as if the host came too late (4 H200, 2026-11-27)."""
_SLACK_NS = 200_000

ElapsedMs = Callable[[], float]
"""Milliseconds between the two moments of a call, once it has ended."""


class CallsBackToBack(Calls):
    """Calls take turns on as many inputs and results as may be held. The results left at the end are checked."""

    moments_a_call = 2
    """How many are taken: before the first kernel, and behind the last."""

    def prepare(self) -> None:
        """Draws all inputs, warms up, and runs calls for a capture that has to count: the ranks' barrier included."""
        options = self._options
        self._batches = [self._draw(number) for number in range(min(self._num_at_once, options.iterations))]
        self._inputs = [batch.to(self._backend) for batch in self._batches]
        family = FAMILY_OF.get(options.variant)
        has_own = family is not None and family.count_wrong is not None  # results that the call itself allocates
        self._outputs = [None if has_own else torch.empty_like(batch.x) for batch in self._inputs]
        self._results: list[Any] = [*self._outputs]
        self._events = self._make_events(self.moments_a_call * min(CALLS_AT_ONCE, options.iterations))
        self._num_counted = 1 if self._capture is not None else 0
        if self._capture is not None and options.keep == "first" and options.records_per_track == "auto":
            self._num_counted = len(self._batches)  # each may need most room
        host_s = [self._call_alone(number % len(self._inputs)) for number in range(NUM_WARM_UP)]
        if self._capture is not None:
            with self._capture.counting(repeats=-(-options.iterations // self._num_counted)):
                host_s = [self._call_alone(number, counts=True) for number in range(self._num_counted)]
        self._host_s = statistics.median(host_s[1:] or host_s)

    def warm_up(self) -> None:
        """Runs one untraced call."""
        self._call_alone(0)

    def run(self) -> None:
        """Runs all calls back to back, and checks the results that are left."""
        num_calls, num_kept = self._options.iterations, len(self._inputs)
        for out in self._outputs:
            if out is not None:
                out.fill_(torch.nan)  # warm-up left the right results there
        self._variant.comm.barrier()
        with _no_garbage_collection():
            for first in range(0, num_calls, CALLS_AT_ONCE):
                self._run_some(range(first, min(first + CALLS_AT_ONCE, num_calls)))
        self.num_tokens = sum(self._batches[number % num_kept].num_tokens for number in range(num_calls))
        self.wrong_elements = sum(map(self._count_wrong, itertools.count(), self._batches, self._results))
        self.num_checked = num_kept

    def _run_some(self, numbers: range) -> None:
        streams = self._variant.comm.device.streams
        if self._backend != "cpu":
            streams.delay(streams.current(), int(_SLACK_NS + _SLACK * 1e9 * self._host_s * len(numbers)))
        started = time.perf_counter()
        elapsed_ms = [
            self._start(number % len(self._inputs), self._capture, place) for place, number in enumerate(numbers)
        ]
        self._host_s = max(self._host_s, (time.perf_counter() - started) / len(numbers))
        self._variant.finish()
        self.times_ms += [elapsed() for elapsed in elapsed_ms]
        self._tell(len(numbers))

    def _start(self, idx: int, capture: Capture | None, place: int = 0) -> ElapsedMs:
        """Queues a call of the inputs with this number behind a barrier. place: among those that are queued."""
        variant = self._variant
        variant.comm.align(capture)
        begun = self._moment(2 * place)
        name = f"{self._options.variant} call" if self._backend == "cpu" else f"queue {self._options.variant} call"
        with capture.range(name) if capture is not None else contextlib.nullcontext():
            self._results[idx] = variant.start(self._inputs[idx], capture, self._outputs[idx])
        ended = self._moment(2 * place + 1)
        return lambda: self._between_ms(begun, ended)

    def _make_events(self, count: int) -> list[Any]:
        """Returns events of the device, which their first record creates; none on the CPU backend."""
        if self._backend == "cpu":
            return []
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(count)
        ]
        for event in events:
            event.record()
        return events

    def _moment(self, number: int) -> Any:
        if self._backend == "cpu":
            return time.perf_counter()
        self._events[number].record()
        return self._events[number]

    def _between_ms(self, begun: Any, ended: Any) -> float:
        return (ended - begun) * 1e3 if self._backend == "cpu" else float(begun.elapsed_time(ended))

    def _call_alone(self, idx: int, counts: bool = False) -> float:
        """Runs a call by itself. Returns the seconds that its host needed to queue it."""
        started = time.perf_counter()
        self._start(idx, self._capture if counts else None)
        host_s = time.perf_counter() - started
        self._variant.finish()
        if counts:
            self._tell()
        return host_s


def least_us(options: MoeRun) -> float:
    """Returns how long the wires take at least for the first call's rows (tracekern/moe/calls/wire.py)."""
    shape = options.shape
    draw = functools.partial(
        draw_choices, shape, iteration=0, seed=options.seed, routing=options.routing, uneven=options.uneven
    )
    chosen = [draw(rank=rank)[0] for rank in range(shape.num_ranks)]
    return least_call_us(chosen, shape.num_experts, shape.row_bytes)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps Python from pausing between two launches to collect. This process has nothing to do but the run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
