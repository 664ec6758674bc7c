"""The calls of one rank: draws inputs, runs calls and checks results, some batches at a time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import torch

from tracekern.moe.families import FAMILY_OF
from tracekern.moe.reference import reference
from tracekern.moe.routing import Batch, draw_batch
from tracekern.moe.run import PROGRESS, MoeRun
from tracekern.record.session import Capture

Call = Callable[[Batch, Capture | None], torch.Tensor]

BATCHES_BYTES, BATCHES_TOKENS = 64 << 20, 8192
"""Most bytes and tokens of batches that a rank holds at a time, but at least one batch. Calls with these batches are
back to back; drawing and checking between them and the next ones takes a second or less."""
TELL_EVERY_S = 0.1
"""Interval between progress reports. A rank that reports enters its next call late, and the others wait for it
(docs/walkthrough.md)."""


class Calls:
    """All calls of a run on this rank, and their results."""

    def __init__(
        self, options: MoeRun, rank: int, backend: str, call: Call, capture: Capture | None, num_counted: int
    ) -> None:
        """num_counted: calls of count(), for progress."""
        self._options, self._rank, self._backend = options, rank, backend
        self._call, self._capture = call, capture
        self._num_counted = num_counted
        # The order of a sum in the matrix instruction is the device's own: int4 experts have the same bits there alone.
        self._reference_device = backend if options.has_int4_experts else "cpu"
        self._experts = options.draw_experts().to(self._reference_device)
        self._num_done, self._told_s = 0, time.monotonic()
        self.wrong_elements = self.num_tokens = 0
        self.times_ms: list[float] = []
        """Host time of each call of run()."""

    def count(self) -> None:
        """Runs the first calls, for a capture that is counting."""
        for batches in self._drawn(self._num_counted):
            for batch in batches:
                self._call(batch.to(self._backend), self._capture)
                self._tell()

    def warm_up(self) -> None:
        """Runs one untraced call."""
        self._call(self._draw(0).to(self._backend), None)

    def run(self) -> None:
        """Runs all calls without a barrier in between, and checks every result."""
        for batches in self._drawn(self._options.iterations):
            outputs = [self._timed(batch) for batch in [batch.to(self._backend) for batch in batches]]
            self.num_tokens += sum(batch.num_tokens for batch in batches)
            self.wrong_elements += sum(map(self._count_wrong, batches, outputs))

    def _timed(self, batch: Batch) -> torch.Tensor:
        started = time.perf_counter()
        capture, name = self._capture, f"{self._options.variant} call"
        with capture.range(name) if capture is not None else contextlib.nullcontext():
            out = self._call(batch, capture)
        self.times_ms.append((time.perf_counter() - started) * 1e3)
        self._tell()
        return out

    def _tell(self) -> None:
        self._num_done += 1
        total = self._num_counted + self._options.iterations
        if self._rank == 0 and (time.monotonic() - self._told_s > TELL_EVERY_S or self._num_done == total):
            sys.stdout.write(f"{PROGRESS}{self._num_done} {total}\n")
            sys.stdout.flush()
            self._told_s = time.monotonic()

    def _drawn(self, num_calls: int) -> Iterator[list[Batch]]:
        """Yields the batches of the first `num_calls` calls, as many at a time as may be held."""
        shape = self._options.shape
        at_once = max(1, min(BATCHES_BYTES // (2 * shape.row_bytes), BATCHES_TOKENS) // shape.max_tokens)
        for first in range(0, num_calls, at_once):
            yield [self._draw(iteration) for iteration in range(first, min(first + at_once, num_calls))]

    def _draw(self, iteration: int) -> Batch:
        options = self._options
        return draw_batch(
            options.shape,
            seed=options.seed,
            rank=self._rank,
            iteration=iteration,
            routing=options.routing,
            uneven=options.uneven,
        )

    def _count_wrong(self, batch: Batch, out: torch.Tensor) -> int:
        variant, family = self._options.variant, FAMILY_OF.get(self._options.variant)
        batch = batch.to(self._reference_device)
        if family:
            options = self._options
            wanted = family.expected(variant, batch, self._experts, options.shape, options.family_options)
        else:
            wanted = reference(batch, self._experts)
        bits = torch.int32 if out.dtype == torch.float32 else torch.int16
        return int((wanted.cpu().view(bits) != out.cpu().view(bits)).sum())
