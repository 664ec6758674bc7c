"""What is simulated: the shape of the program, its size, its noise, and what is injected."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

import numpy as np


class Shape(enum.Enum):
    """Who waits for whom."""

    CHAIN = "chain"
    """Each rank waits for the one before it, works, and signals the next; an iteration ends where all ranks meet."""
    STREAM = "stream"
    """A chain whose iterations follow each other without a barrier."""
    RING = "ring"
    """All ranks work, signal the next rank and wait for the one before it."""
    CREDITS = "credits"
    """A stream whose ranks may be at most `window` messages ahead of the next one."""
    EXCHANGE = "exchange"
    """Dispatch and combine: a warp for each peer sends and then receives, in kernels of their own."""
    BARRIER = "barrier"
    """All ranks work and meet."""
    PIPELINE = "pipeline"
    """Dispatch and combine as the bundled kernels do it: four kernels of many warps, one of which waits for the counts
    of all ranks while the others wait for it at the block's barrier."""
    STREAMS = "streams"
    """Warp 0 exchanges with the ranks beside it, warp 1 computes on another stream; a kernel after both ends it."""


class Noise(enum.Enum):
    """How times vary around their mean."""

    NORMAL = "normal"
    HEAVY = "heavy-tailed"
    """Student's t of 3 degrees of freedom, of the same standard deviation."""
    AUTOCORRELATED = "autocorrelated"
    """Each time is correlated with the one before it of the same warp, by .7."""


@dataclass(frozen=True)
class Injection:
    """Something that takes longer."""

    ns: int = 0
    iterations: tuple[int, ...] = ()
    """In which it does; empty for all."""

    def applies(self, iteration: int) -> bool:
        return not self.iterations or iteration in self.iterations

    def work_ns(self, rank: int, iteration: int, base_ns: float, warp: int = 0) -> float:
        """What is added to work that would take `base_ns`."""
        return 0.0

    def pause_ns(self, rank: int, iteration: int) -> float:
        """What is added to time outside spans."""
        return 0.0

    def more_pieces(self, rank: int, iteration: int) -> int:
        """How many tokens are added to those of each warp."""
        return 0

    def latency_ns(self, source: int, destination: int, iteration: int) -> float:
        """What is added to a flag's way after its store."""
        return 0.0

    def drain_ns(self, source: int, destination: int, iteration: int) -> float:
        """What is added to the time in which stores drain, while the signal is open."""
        return 0.0

    def host_ns(self, rank: int, iteration: int) -> float:
        """What is added to the gap before the first kernel of an iteration."""
        return 0.0

    def extra_ns(self, rank: int, iteration: int) -> float:
        """How long a kernel works that no other rank has, before those of the iteration; 0: there is none."""
        return 0.0


@dataclass(frozen=True)
class SlowWork(Injection):
    """A rank works longer."""

    ns: int = 0
    rank: int = 0
    share: float = 0.0
    """Of the work, on top of `ns`."""

    def work_ns(self, rank: int, iteration: int, base_ns: float, warp: int = 0) -> float:
        return self.ns + self.share * base_ns if rank == self.rank and self.applies(iteration) else 0.0


@dataclass(frozen=True)
class SlowWarp(SlowWork):
    """A single warp of a rank works longer."""

    warp: int = 0

    def work_ns(self, rank: int, iteration: int, base_ns: float, warp: int = 0) -> float:
        return super().work_ns(rank, iteration, base_ns) if warp == self.warp else 0.0


@dataclass(frozen=True)
class SlowPause(SlowWork):
    """A rank takes longer between its spans."""

    def work_ns(self, rank: int, iteration: int, base_ns: float, warp: int = 0) -> float:
        return 0.0

    def pause_ns(self, rank: int, iteration: int) -> float:
        return super().work_ns(rank, iteration, 0.0)


@dataclass(frozen=True)
class MoreWork(Injection):
    """Each warp of a rank gets more tokens."""

    rank: int = 0
    pieces: int = 1

    def more_pieces(self, rank: int, iteration: int) -> int:
        return self.pieces if rank == self.rank and self.applies(iteration) else 0


@dataclass(frozen=True)
class MovingWork(Injection):
    """In iteration i rank `i % num_ranks` works longer."""

    num_ranks: int = 1

    def work_ns(self, rank: int, iteration: int, base_ns: float, warp: int = 0) -> float:
        return self.ns if rank == iteration % self.num_ranks and self.applies(iteration) else 0.0


@dataclass(frozen=True)
class _OfLink(Injection):
    source: int = 0
    destination: int = 1

    def _of(self, source: int, destination: int, iteration: int) -> float:
        mine = (source, destination) == (self.source, self.destination) and self.applies(iteration)
        return self.ns if mine else 0.0


@dataclass(frozen=True)
class Latency(_OfLink):
    """Flags take longer from one rank to another."""

    def latency_ns(self, source: int, destination: int, iteration: int) -> float:
        return self._of(source, destination, iteration)


@dataclass(frozen=True)
class Drain(_OfLink):
    """Stores take longer to drain from one rank to another: the sender's signal is open as long."""

    def drain_ns(self, source: int, destination: int, iteration: int) -> float:
        return self._of(source, destination, iteration)


@dataclass(frozen=True)
class LatencyOut(Injection):
    """Flags take longer on all links from some ranks to others, as where the network of a node is slow."""

    ranks: tuple[int, ...] = ()

    def latency_ns(self, source: int, destination: int, iteration: int) -> float:
        is_out = source in self.ranks and destination not in self.ranks
        return self.ns if is_out and self.applies(iteration) else 0.0


@dataclass(frozen=True)
class ExtraKernel(Injection):
    """A rank alone runs one more kernel."""

    rank: int = 0

    def extra_ns(self, rank: int, iteration: int) -> float:
        return self.ns if rank == self.rank and self.applies(iteration) else 0.0


@dataclass(frozen=True)
class SmallRing(Injection):
    """The rings of `CREDITS` have few slots, and not the `window` of the case."""

    slots: int = 1


@dataclass(frozen=True)
class LateHost(Injection):
    """A rank's host launches the first kernel of an iteration later."""

    rank: int = 0

    def host_ns(self, rank: int, iteration: int) -> float:
        return self.ns if rank == self.rank and self.applies(iteration) else 0.0


@dataclass(frozen=True)
class Case:
    """One simulated run. All times in true ns."""

    shape: Shape
    num_ranks: int = 4
    iterations: int = 10
    injections: tuple[Injection, ...] = ()
    noise: float = 0.0
    """Standard deviation of the work, of what flags and stores take and of the host's gaps, as a share of each."""
    noise_kind: Noise = Noise.NORMAL
    is_persistent: bool = False
    """One kernel for all iterations, instead of one or several an iteration."""
    has_host_lane: bool = False
    """The host's launches are on record as ranges."""
    work_ns: int = 20_000
    window: int = 2
    """Slots of the ring between two ranks of `CREDITS`; 0: there is always room."""
    latency_ns: int = 600
    drain_ns: int = 400
    see_ns: int = 100
    """From a flag's arrival until a warp that polls it has seen it."""
    gap_ns: int = 2_000
    """Between two kernels of a stream."""
    launch_ns: int = 0
    """How long a host takes to launch a kernel, one after the other, once the iteration before is over; 0: hosts are
    always ahead."""
    hosts_run_ahead: bool = False
    """Hosts with a `launch_ns` wait for no iteration: they launch one kernel after the other, at times of their own."""
    backend: str = "cuda"
    detail: str = "work"
    """"peers": waits for warps of the same rank are not on record."""
    num_warps: int = 0
    """Warps of a kernel; 0: as many as the shape needs."""
    pause_ns: int = 0
    """Time outside spans, before each work."""
    is_uneven: bool = False
    """Each warp of a pipeline has 1 to 3 tokens an iteration, drawn by chance, and not 2."""
    jump_ns: int = 0
    """By how much the clock of the last rank jumps in the middle of the run."""
    ranks_per_node: int = 0
    """Nodes are on record, of so many ranks each; 0: all ranks share one."""
    far_latency_ns: int = 3_000
    """Stands for `latency_ns` between ranks of two nodes."""
    has_host_jitter: bool = False
    """Each kernel is launched 5 to 100 us late."""
    outliers: float = 0.0
    """This share of all times is 10 to 50 times as long."""
    wander: float = 0.0
    """Correlation of a rank's speed with that of the iteration before, which ..."""
    wander_share: float = 0.05
    """... deviates from the mean by such a share."""

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    def tokens(self, rank: int, warp: int, iteration: int) -> int:
        """How many tokens a warp of a pipeline has to copy, without those that are injected."""
        return int(np.random.default_rng([rank, warp, iteration]).integers(1, 4)) if self.is_uneven else 2

    @property
    def slots(self) -> int:
        """Slots of the ring between two ranks; 0: there is always room."""
        return min((entry.slots for entry in self.injections if isinstance(entry, SmallRing)), default=self.window)

    def without_injections(self) -> Case:
        return dataclasses.replace(self, injections=())
