"""The waits that a reader should see first: the longest of the typical iteration, and one that stands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tracekern.export.drawing import Drawing
from tracekern.timeline.facts.iterations import Iterations, find_iterations
from tracekern.timeline.model import OPEN_END, EventClass, Mask, TrackKind

MANY_ITERATIONS = 3
"""With so many iterations or more, the one of median length is the typical one."""
OUTLIER = 2


@dataclass(frozen=True)
class FoundWait:
    """A wait, and the signal that released it."""

    index: int
    """Of its span in the drawing where it was found."""
    choice: int
    """Place of the choice that it is of: see _choices()."""
    track: int
    event: int
    launch: int
    start_ns: int
    wait_ns: int
    is_open: bool
    by_track: int
    """-1 where there is none on record."""
    by_event: int

    @property
    def order(self) -> tuple[int, ...]:
        """The lowest comes first."""
        return self.choice, -self.wait_ns, self.track, self.start_ns


@dataclass(frozen=True)
class LongestWaits:
    """Of some parts of a run those that come first, None for none. Adds up."""

    of_all: FoundWait | None
    of_typical: FoundWait | None
    """Of the typical iteration."""

    @classmethod
    def of(cls, drawing: Drawing, iterations: Iterations) -> LongestWaits:
        """iterations: of the whole run."""
        choices = _choices(drawing)
        typical = _typical(iterations)
        if typical is None:
            return cls(_longest(drawing, choices), None)
        of_launch = np.append(iterations.of_launch, -1)[drawing.timeline.spans.launch]
        return cls(
            _longest(drawing, choices), _longest(drawing, [choice & (of_launch == typical) for choice in choices])
        )

    def __add__(self, other: LongestWaits) -> LongestWaits:
        return LongestWaits(_first(self.of_all, other.of_all), _first(self.of_typical, other.of_typical))


def _first(one: FoundWait | None, other: FoundWait | None) -> FoundWait | None:
    return min(filter(None, (one, other)), key=lambda wait: wait.order, default=None)


def _typical(iterations: Iterations) -> int | None:
    """The number of the typical iteration; None where there are few."""
    return int(iterations.number[iterations.best_median_worst()[1]]) if len(iterations) >= MANY_ITERATIONS else None


@dataclass(frozen=True)
class FirstWaits:
    longest: FoundWait | None
    """The longest wait of the typical iteration; of all iterations if there are fewer than MANY_ITERATIONS."""
    outlier: FoundWait | None
    """The longest of all, where it is of another iteration and OUTLIER times as long."""
    when: str = ""
    """Which iteration the longest is of, in words; "" where there are few."""
    outlier_when: str = ""

    @classmethod
    def of(cls, waits: LongestWaits, iterations: Iterations) -> FirstWaits:
        """A wait that never ended comes first, in whatever iteration."""
        longest, typical, number = waits.of_all, waits.of_typical, _typical(iterations)
        if longest is None or longest.is_open or typical is None:
            return cls(longest, None)
        iteration = int(np.append(iterations.of_launch, -1)[longest.launch])
        is_outlier = iteration != number and longest.wait_ns > OUTLIER * typical.wait_ns
        return cls(
            longest=typical,
            outlier=longest if is_outlier else None,
            when=f"in iteration {number}, of median length among {len(iterations)}",
            outlier_when=f"in iteration {iteration}" if iteration >= 0 else "outside the iterations",
        )

    @property
    def indices(self) -> list[int]:
        """Of their spans, where there is one drawing."""
        return [wait.index for wait in (self.longest, self.outlier) if wait is not None]


def _longest(drawing: Drawing, choices: Sequence[Mask]) -> FoundWait | None:
    """The longest span of the first choice that has any."""
    found = next((number for number, choice in enumerate(choices) if choice.any()), None)
    if found is None:
        return None
    spans, which = drawing.timeline.spans, np.flatnonzero(choices[found])
    index = int(which[(drawing.draw_end - spans.start)[which].argmax()])
    by = int(drawing.releaser[index])
    start_ns = int(spans.start[index])
    return FoundWait(
        index=index,
        choice=found,
        track=int(spans.track[index]),
        event=int(spans.event[index]),
        launch=int(spans.launch[index]),
        start_ns=start_ns,
        wait_ns=int(drawing.draw_end[index]) - start_ns,
        is_open=bool(spans.end[index] == OPEN_END),
        by_track=int(spans.track[by]) if by >= 0 else -1,
        by_event=int(spans.event[by]) if by >= 0 else -1,
    )


def _choices(drawing: Drawing) -> list[Mask]:
    """Waits of kernels and engines, [num_spans] masks, the preferred ones first.

    Preferred is one that never ended, on a rank that lived to close its capture: what a kernel hung in. Then one that a
    signal released, first of all that of another rank: it has an arrow to follow. One of start-up comes last.
    """
    timeline = drawing.timeline
    is_wait = timeline.events_of(EventClass.WAIT)
    is_theirs = timeline.tracks_of(TrackKind.DEVICE) | timeline.tracks_of(TrackKind.ENGINE)
    spans = timeline.spans
    chosen = is_wait[spans.event] & is_theirs[spans.track]
    alive = {rank.rank for rank in timeline.ranks if rank.state != "salvaged"}
    is_alive = np.array([track.rank in alive for track in timeline.tracks] or [False])
    hung = chosen & (spans.end == OPEN_END)
    rank = timeline.track_ranks()[spans.track]
    is_released = chosen & (drawing.releaser >= 0)
    from_afar = is_released & (rank[drawing.releaser] != rank)
    later = ~drawing.in_start_up
    return [hung & is_alive[spans.track], hung, from_afar & later, is_released & later, chosen & later, chosen]


def first_waits(drawing: Drawing) -> FirstWaits:
    """Of a drawing that is all of a run."""
    iterations = find_iterations(drawing.timeline)
    return FirstWaits.of(LongestWaits.of(drawing, iterations), iterations)
