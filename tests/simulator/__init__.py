"""Ranks whose true times are known, to judge what the analysis makes of their captures.

    from simulator import Case, Shape, SlowWork, simulate

    case = Case(Shape.CHAIN, num_ranks=8, iterations=10, noise=0.05, injections=(SlowWork(rank=2, ns=5_000),))
    truth = simulate(case, seed=1, directory=tmp_path)   # writes a capture there; tracekern.load(truth.directory)
    cost_ns = truth.cost_ns   # the same seed without the injections

The simulation is one of discrete events (`engine`): every warp is a program of `programs`, in true ns. Its records are
written through the real segment and packer, with clocks of an offset and a rate of their own and ping-pong samples
(`capture`), so that `load` reads what a GPU would have left: the dumps say backend cuda.

Injections, one class each (`cases`): SlowWork (a rank works longer, by ns or by a share), SlowWarp (one of its warps),
SlowPause (outside spans), MoreWork (more tokens), MovingWork (another rank in every iteration), ExtraKernel (that one
rank alone has), Latency and Drain (a link), LatencyOut (all links out of a rank or of a node), LateHost (a gap before a
rank's kernels), SmallRing (few slots). Every one can be confined to some iterations; several of them make a set. Ranks
that are all alike differ by noise, by host jitter, by outliers and by speeds that wander (`Case`). Noise is drawn by
rank, warp and place in the program, so the same seed gives the same noise with and without an injection.
"""

from simulator.cases import (
    Case,
    Drain,
    ExtraKernel,
    Injection,
    LateHost,
    Latency,
    LatencyOut,
    MoreWork,
    MovingWork,
    Noise,
    Shape,
    SlowPause,
    SlowWarp,
    SlowWork,
    SmallRing,
)
from simulator.run import Truth, simulate, simulate_groups

__all__ = [
    "Case",
    "Drain",
    "ExtraKernel",
    "Injection",
    "LateHost",
    "Latency",
    "LatencyOut",
    "MoreWork",
    "MovingWork",
    "Noise",
    "Shape",
    "SlowPause",
    "SlowWarp",
    "SlowWork",
    "SmallRing",
    "Truth",
    "simulate",
    "simulate_groups",
]
