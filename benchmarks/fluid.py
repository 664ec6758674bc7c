"""Work of many ranks as fluid: walks that share links and memory fairly, and wait for what other walks make.

A walk is what some warps of a rank do, one part after the other. The rows of a part move together, in fixed proportion,
at one rate. Rates are max-min fair: all rise together until a resource is full, those that use it stay there, and the
others go on. Between two events (a part ends, or a walk has caught up with what it takes) rates are constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

LEAST = 1e-9
"""A share of a capacity or of a part below which nothing is left."""
SLACK = 1e-7
"""A share of a stream: a walk that takes it and is this close to the one that makes it has caught up."""
CLOSE = 1e-7
"""Speeds that differ by this share are the same."""
MAX_ATTEMPTS = 12
"""Attempts to find rates at which no stream is taken faster than it is made."""


@dataclass(frozen=True)
class Part:
    """One part of a walk.

    uses: [num_resources] what the whole part uses. size: its rate is compared with others' in this unit, bytes. makes:
    stream -> rows. takes: stream -> the rows before those that it takes, and those after which it is through: it goes
    from the first to the last as it proceeds, but no further than the stream was made.
    """

    size: float
    uses: np.ndarray
    makes: dict[int, float] = field(default_factory=dict)
    takes: dict[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Walk:
    """Parts in order. after: walks, by index, that have to end before it starts."""

    parts: Sequence[Part]
    after: tuple[int, ...] = ()


def fair_rates(uses: np.ndarray, capacities: np.ndarray, most: np.ndarray | None = None) -> np.ndarray:
    """Max-min fair rates, [num_flows].

    uses: [num_flows, num_resources] for each unit of a flow's rate. most: the highest rate of each flow where no
    resource holds it. Raises ValueError for a flow that nothing holds.
    """
    most = np.full(len(uses), np.inf) if most is None else most
    used = uses > 0
    rates = np.zeros(len(uses))
    rising = most > 0
    while rising.any():
        load = rising.astype(float) @ uses
        left = np.maximum(capacities - rates @ uses, 0)
        # The level at which each resource is full, if all that use it rise until then; others' ends only raise it.
        full_at = np.divide(left, load, out=np.full(len(left), np.inf), where=load > 0)
        level = np.minimum(np.where(used, full_at, np.inf).min(axis=1), most)
        if not np.isfinite(level[rising]).all():
            raise ValueError("a flow uses no resource and has no highest rate")
        lowest = np.where(used & rising[:, None], level[:, None], np.inf).min(axis=0)
        ends = rising & ((used & (full_at <= lowest * (1 + LEAST))).any(axis=1) | (level >= most))
        rates[ends] = level[ends]
        rising &= ~ends
    return rates


class _Lines:
    """Streams of all parts, a line each: its number, and two values."""

    def __init__(self, of_parts: list[list[tuple[int, float, float]]]) -> None:
        self._lines = np.array([line for lines in of_parts for line in lines], float).reshape(-1, 3)
        self._counts = np.array([len(lines) for lines in of_parts], np.int64)
        self._starts = np.cumsum(self._counts) - self._counts

    def of(self, parts: np.ndarray) -> tuple[np.ndarray, ...]:
        """Of some parts: whose each line is, as a place in `parts`, the stream and the values."""
        counts = self._counts[parts]
        places = np.repeat(np.arange(len(parts)), counts)
        skipped = self._starts[parts] - (np.cumsum(counts) - counts)
        lines = self._lines[skipped[places] + np.arange(len(places))]
        return places, lines[:, 0].astype(np.int64), lines[:, 1], lines[:, 2]


@dataclass(frozen=True)
class _Held:
    """Parts that a stream holds back: places among those under way, the streams, rows that are taken of each, and which
    parts wait until more is made.
    """

    places: np.ndarray
    streams: np.ndarray
    rows: np.ndarray
    wait: np.ndarray

    def most(self, num_parts: int, made: np.ndarray) -> np.ndarray:
        """Highest speeds where so many rows of each stream are made in a us."""
        found = np.full(num_parts, np.inf)
        np.minimum.at(found, self.places, np.where(self.wait, 0, made[self.streams] / self.rows))
        return found


class Simulation:
    """Runs `walks` over resources of the given capacities (units a us).

    ended: when each walk did, us. used: of each resource. made: rows of each stream. Raises ValueError where walks wait
    for a stream that no walk makes.
    """

    def __init__(self, walks: Sequence[Walk], capacities: np.ndarray) -> None:
        self.walks = walks
        self.capacities = capacities
        parts = [part for walk in walks for part in walk.parts]
        ends = np.cumsum([len(walk.parts) for walk in walks], dtype=np.int64)
        self._uses = np.array([part.uses for part in parts]).reshape(-1, len(capacities))
        self._sizes = np.array([part.size for part in parts])
        self._makes = _Lines([[(stream, rows, 0) for stream, rows in part.makes.items()] for part in parts])
        self._takes = _Lines([[(stream, *rows) for stream, rows in part.takes.items()] for part in parts])
        streams = [stream for part in parts for stream in (*part.makes, *part.takes)]
        self.made = np.zeros(1 + max(streams, default=-1))
        self.used = np.zeros(len(capacities))
        self.ended = np.full(len(walks), np.nan)
        self.now = 0.0
        self._part = ends - [len(walk.parts) for walk in walks]  # of each walk, the one under way
        self._ends = ends
        self._done = np.zeros(len(walks))  # share of that part
        self._most = np.full(len(walks), np.inf)  # where the search for its speed begins
        self._waiting = list(range(len(walks)))
        self._running = np.zeros(0, np.int64)
        self._start_walks()
        while len(self._running):
            self._advance()
        if self._waiting:
            raise ValueError(f"walks {self._waiting} wait for each other")

    def _start_walks(self) -> None:
        """Starts what may start; a walk without parts ends at once."""
        while ready := [i for i in self._waiting if not np.isnan(self.ended[list(self.walks[i].after)]).any()]:
            self._waiting = [walk for walk in self._waiting if walk not in ready]
            started = [walk for walk in ready if self.walks[walk].parts]
            self._running = np.concatenate([self._running, np.array(started, np.int64)])
            self.ended[[walk for walk in ready if not self.walks[walk].parts]] = self.now

    def _advance(self) -> None:
        """To the next event."""
        running = self._running
        places, streams, first, last = self._takes.of(self._part[running])
        rows = last - first
        ahead = self.made[streams] - first - rows * self._done[running][places]
        slack = SLACK * last
        short = self.made[streams] < last - slack  # more will be made, and is needed
        held = short & (ahead <= slack)
        speeds, made = self._speeds(running, _Held(places[held], streams[held], rows[held], (ahead < -slack)[held]))
        # Who has fallen behind catches up, and of what is waited for enough is there.
        gains = made[streams] - rows * speeds[places]
        gap = np.where(ahead > slack, slack / 2, -slack / 2) - ahead
        meets = short & (np.abs(ahead) > slack) & (gap * gains > 0)
        step = min(
            np.divide(1 - self._done[running], speeds, out=np.full(len(speeds), np.inf), where=speeds > 0).min(),
            (gap[meets] / gains[meets]).min(initial=np.inf),
        )
        if step == np.inf:
            raise ValueError(f"walks {running.tolist()} take what no walk makes")
        self.now += step
        self.made += step * made
        self.used += step * (speeds @ self._uses[self._part[running]])
        self._done[running] += step * speeds
        self._end_parts(running[self._done[running] >= 1 - LEAST])

    def _end_parts(self, walks: np.ndarray) -> None:
        self._part[walks] += 1
        self._done[walks] = 0
        self._most[walks] = np.inf
        ended = walks[self._part[walks] == self._ends[walks]]
        if len(ended):
            self.ended[ended] = self.now
            self._running = self._running[np.isnan(self.ended[self._running])]
            self._start_walks()

    def _speeds(self, running: np.ndarray, held: _Held) -> tuple[np.ndarray, np.ndarray]:
        """Shares of each part done in a us, and rows made of each stream. Who has caught up with a stream is no faster
        than who makes it; a search, since who is held leaves more of its resources to the others.
        """
        sizes = self._sizes[self._part[running]]
        uses = self._uses[self._part[running]] / sizes[:, None]
        makers, streams, rows, _ = self._makes.of(self._part[running])
        most = self._most[running]
        for attempt in range(MAX_ATTEMPTS):
            speeds = fair_rates(uses, self.capacities, most * sizes) / sizes
            made = np.bincount(streams, rows * speeds[makers], len(self.made))
            limits = held.most(len(running), made)
            too_slow = (speeds >= most * (1 - CLOSE)) & (limits > most * (1 + CLOSE))
            too_fast = speeds > limits * (1 + CLOSE)
            if not (too_slow | too_fast).any():
                break
            # Halfway, where a maker and its taker give way to each other in turns.
            halfway = np.isfinite(most) & np.isfinite(limits) & (attempt > 1)
            most = np.where(halfway, (most + limits) / 2, limits)
        while too_fast.any():  # the attempts were too few: only lowers, so that nothing is overdrawn
            speeds = np.minimum(speeds, limits)
            made = np.bincount(streams, rows * speeds[makers], len(self.made))
            limits = held.most(len(running), made)
            too_fast = speeds > limits * (1 + CLOSE)
        self._most[running] = most
        return speeds, made
