"""What limits the rings of int4 experts: where their warps spend the tiles that are on record step by step.

docs/int4_trace.md says how to read it. A tile is a span `multiply_tile` of a consumer; its steps are the spans inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from tracekern.analysis.partial import Sums
from tracekern.analysis.questions.staging import launch_names
from tracekern.timeline.facts.stage_fill import closed_rows
from tracekern.timeline.model import Int64, Timeline
from tracekern.timeline.table import Table

TILE = "multiply_tile"
CONSUMER_STEPS = ("wait_stage", "multiply_stage")
PRODUCER_STEPS = ("wait_slot", "issue_copy")
SAMPLE = "decode_sample"
"""One decoding inside a `multiply_stage`; its field `decodes` says how many it stands for."""


class Limit(Enum):
    """What a ring waits for."""

    MEMORY = "memory"
    CONSUMERS = "decoding and multiplying"
    PRODUCER = "starting copies"


@dataclass(frozen=True, repr=False)
class RingSteps(Table):
    """[n] sums by rank and kernel, in this order, of the tiles of consumers that have steps."""

    rank: Int64
    kernel: Int64
    """Index into `kernels`."""
    tiles: Int64
    tile_ns: Int64
    consumer_ns: Int64
    """[n, 2] time in each of CONSUMER_STEPS."""
    decode_ns: Int64
    """[n] estimate of the part of `multiply_stage` that decodes: each sample, times the decodings it stands for."""
    producer_ns: Int64
    """[n, 2] time in each of PRODUCER_STEPS."""
    kernels: tuple[str, ...]
    """Names of launches."""

    @property
    def rest_ns(self) -> Int64:
        """[n] time of tiles in no step: mostly what the records cost."""
        rest: Int64 = self.tile_ns - self.consumer_ns.sum(axis=1)
        return rest

    def limit(self, row: int) -> Limit | None:
        """Returns what a row's ring waits for most; None where the records took too much to tell.

        Records lengthen work and shorten waiting. So consumers that wait longer than they work do wait: for the
        producer where it starts copies longer than it waits for slots, else for memory. Consumers limit a ring if they
        work longer than they wait even with all of the rest counted as waiting.
        """
        wait, work = self.consumer_ns[row].tolist()
        if wait > work:
            wait_slot, issue = self.producer_ns[row].tolist()
            return Limit.PRODUCER if issue > wait_slot else Limit.MEMORY
        return Limit.CONSUMERS if work > wait + int(self.rest_ns[row]) else None


def ring_steps(timeline: Timeline, sums: Sums | None = None) -> RingSteps | None:
    """Sums up the steps of all rings. None where no tile of a consumer has any.

    Works on unaligned Timelines too: nothing is compared across ranks. sums: sums_of_tiles(), of the timeline by
    default.
    """
    sums = sums_of_tiles(timeline) if sums is None else sums
    if not sums["tiles"].any():
        return None
    rank, kernel = sums.keys
    known, kernel = np.unique(kernel, return_inverse=True)
    names = launch_names(timeline)
    consumers, produced = (
        np.stack([sums[name] for name in steps], axis=1) for steps in (CONSUMER_STEPS, PRODUCER_STEPS)
    )
    decode = np.minimum(sums[SAMPLE], consumers[:, 1])  # an estimate may exceed what it is a part of
    kernels = tuple(names[number] for number in known.tolist())
    return RingSteps(rank, kernel, sums["tiles"], sums[TILE], consumers, decode, produced, kernels)


def sums_of_tiles(timeline: Timeline) -> Sums:
    """By rank and kernel, as launch_names() number them: `tiles` that have steps, and ns of these and of each step."""
    spans = timeline.spans
    tile = closed_rows(timeline, TILE)
    steps = [closed_rows(timeline, name) for name in (*CONSUMER_STEPS, SAMPLE)]
    row = np.concatenate([tile, *steps])
    which = np.repeat(np.arange(-1, len(steps)), [len(tile), *map(len, steps)])
    order = np.lexsort((which, spans.start[row], spans.track[row]))  # a tile, then its steps
    row, which = row[order], which[order]
    last = np.cumsum(which < 0) - 1  # the tile that began last, on whatever track
    is_inside = (which >= 0) & (last >= 0)
    outer = row[which < 0][last] if len(tile) else row
    is_inside &= (spans.track[row] == spans.track[outer]) & (spans.end[row] <= spans.end[outer])
    detailed = np.unique(outer[is_inside])
    producers = [closed_rows(timeline, name) for name in PRODUCER_STEPS]
    every = np.concatenate([detailed, row[is_inside], *producers])
    number = {name: idx for idx, name in enumerate(launch_names(timeline))}
    kernel = np.array([*(number[launch.name] for launch in timeline.launches), -1], np.int64)
    # 0: a tile, then the steps in the order of their names.
    sizes = [len(detailed), int(is_inside.sum()), *map(len, producers)]
    part = np.repeat([0, 1, 1 + len(steps), 2 + len(steps)], sizes)
    part[len(detailed) : len(detailed) + sizes[1]] += which[is_inside]
    ns = spans.end[every] - spans.start[every]
    is_sample = part == len(steps)
    ns[is_sample] *= timeline.field(every[is_sample], "decodes")
    names = (TILE, *CONSUMER_STEPS, SAMPLE, *PRODUCER_STEPS)
    of_parts = {name: np.where(part == place, ns, 0) for place, name in enumerate(names)}
    keys = timeline.track_ranks()[spans.track[every]], kernel[spans.launch[every]]
    return Sums.of(keys, tiles=part == 0, **of_parts)
