"""The calls of one rank as its host drives them: draws inputs, runs calls and checks results, some at a time."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from tracekern.comm.communicator import Communicator
from tracekern.launcher.workload import PROGRESS, tell
from tracekern.moe.families import FAMILY_OF
from tracekern.moe.reference import reference
from tracekern.moe.routing import Batch, draw_batch
from tracekern.moe.workload.options import MoeRun
from tracekern.record.session import Capture

BATCHES_BYTES, BATCHES_TOKENS = 64 << 20, 8192
"""Most bytes and tokens of batches that a rank holds at a time, but at least one batch. Drawing and checking that many
takes a second or less."""
TELL_EVERY_S = 0.1
"""Interval between progress reports. A rank that reports enters its next call late, and the others wait for it
(docs/walkthrough.md)."""


AfterStage = Callable[[str], None]
"""Is told the name of each kernel of a call when it was started."""


class Start(Protocol):
    """Starts a call, and returns where its result will be: `out` if given, which Family.count_wrong rules out."""

    def __call__(
        self,
        batch: Batch,
        capture: Capture | None,
        out: torch.Tensor | None = None,
        after_stage: AfterStage | None = None,
    ) -> Any: ...


class Variant(NamedTuple):
    """What a rank runs."""

    start: Start
    finish: Callable[[], None]
    """Waits for what was started."""
    comm: Communicator
    options: dict[str, int]
    """Option of the family -> the value that was chosen."""
    num_blocks: int = 0
    """Blocks of its kernels, where nothing else was asked for; 0: it has none."""


class Calls:
    """All calls of a run on this rank, and their results. Each call starts after the host has seen the last one end."""

    def __init__(self, options: MoeRun, rank: int, backend: str, variant: Variant, capture: Capture | None) -> None:
        self._options, self._rank, self._backend = options, rank, backend
        self._variant, self._capture = variant, capture
        self._num_counted = num_counted(options, backend) if capture is not None else 0
        # The order of a sum in the matrix instruction is the device's own: int4 experts have the same bits there alone.
        self._reference_device = backend if options.has_int4_experts else "cpu"
        self._experts = options.draw_experts().to(self._reference_device)
        self._num_done, self._told_s = 0, time.monotonic()
        self.wrong_elements = self.num_checked = self.num_tokens = 0
        self.times_ms: list[float] = []
        """Time of each call of run()."""

    def prepare(self) -> None:
        """Runs the first calls, for a capture that has to count its records first."""
        if self._capture is None or not self._num_counted:
            return
        with self._capture.counting():
            for batches in self._drawn(self._num_counted):
                for batch in batches:
                    self._call(batch.to(self._backend), self._capture)
                    self._tell()

    def warm_up(self) -> None:
        """Runs one untraced call."""
        self._call(self._draw(0).to(self._backend), None)

    def run(self) -> None:
        """Runs all calls, and checks every result. Drawing and checking come between them, where they have to."""
        self._variant.comm.barrier(self._capture)
        for batches in self._drawn(self._options.iterations):
            outputs = [self._timed(batch) for batch in [batch.to(self._backend) for batch in batches]]
            self.num_tokens += sum(batch.num_tokens for batch in batches)
            self.wrong_elements += sum(map(self._count_wrong, itertools.count(self.num_checked), batches, outputs))
            self.num_checked += len(batches)

    def _call(self, batch: Batch, capture: Capture | None) -> Any:
        out = self._variant.start(batch, capture)
        self._variant.finish()
        return out

    def _timed(self, batch: Batch) -> Any:
        started = time.perf_counter()
        capture, name = self._capture, f"{self._options.variant} call"
        with capture.range(name) if capture is not None else contextlib.nullcontext():
            out = self._call(batch, capture)
        self.times_ms.append((time.perf_counter() - started) * 1e3)
        self._tell()
        return out

    def _tell(self, num_calls: int = 1) -> None:
        self._num_done += num_calls
        total = self._num_calls
        if self._rank == 0 and (time.monotonic() - self._told_s > TELL_EVERY_S or self._num_done == total):
            tell(PROGRESS, f"{self._num_done} {total}")
            self._told_s = time.monotonic()

    @property
    def _num_calls(self) -> int:
        """Returns how many calls there are to tell of."""
        return self._num_counted + self._options.iterations

    def _drawn(self, num_calls: int) -> Iterator[list[Batch]]:
        """Yields the batches of the first `num_calls` calls, as many at a time as may be held."""
        for first in range(0, num_calls, self._num_at_once):
            yield [self._draw(iteration) for iteration in range(first, min(first + self._num_at_once, num_calls))]

    @property
    def _num_at_once(self) -> int:
        """Returns how many batches, and their results, may be held."""
        shape, family = self._options.shape, FAMILY_OF.get(self._options.variant)
        rows = shape.max_tokens * (shape.num_ranks if family and family.count_wrong else 1)
        return max(1, min(BATCHES_BYTES // (2 * shape.row_bytes), BATCHES_TOKENS) // rows)

    def _draw(self, iteration: int, rank: int | None = None) -> Batch:
        """Returns the batch of a rank, by default of this one."""
        options = self._options
        return draw_batch(
            options.shape,
            seed=options.seed,
            rank=self._rank if rank is None else rank,
            iteration=iteration,
            routing=options.routing,
            uneven=options.uneven,
        )

    def _count_wrong(self, iteration: int, batch: Batch, out: Any) -> int:
        options, variant = self._options, self._options.variant
        family = FAMILY_OF.get(variant)
        if family and family.count_wrong:
            batches = [self._draw(iteration, rank) for rank in range(options.ranks)]
            about = self._experts, options.shape, self._variant.options
            return family.count_wrong(out, batches, self._rank, *about)
        batch = batch.to(self._reference_device)
        if family and family.expected:
            wanted = family.expected(variant, batch, self._experts, options.shape, options.family_options)
        else:
            wanted = reference(batch, self._experts)
        bits = torch.int32 if out.dtype == torch.float32 else torch.int16
        return int((wanted.cpu().view(bits) != out.cpu().view(bits)).sum())


def num_counted(options: MoeRun, backend: str) -> int:
    """Returns how many calls to run inside counting(), where nothing is recorded, whatever happens.

    Tracks that keep their first records are large enough only if the largest call was counted. A flight recorder's
    tracks have a fixed size; there counting() only decides the sink, which matters on GPUs only, and any call will do.
    """
    if options.records_per_track != "auto":
        return 0
    if options.keep == "first":
        return options.iterations
    return 0 if backend == "cpu" else 1
