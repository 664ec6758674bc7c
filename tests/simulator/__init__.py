"""Ranks whose true times are known, to judge what the analysis makes of their captures.

    from simulator import Case, Shape, SlowWork, simulate

    case = Case(Shape.CHAIN, num_ranks=8, iterations=10, noise=0.05, injections=(SlowWork(rank=2, ns=5_000),))
    truth = simulate(case, seed=1, directory=tmp_path)   # writes a capture there; tracekern.load(truth.directory)
    cost_ns = truth.makespan_ns - simulate(case.without_injections(), 1, other).makespan_ns

The simulation is one of discrete events (`engine`): every warp is a program of `programs`, in true ns. Its records are
written through the real segment and packer, with clocks of an offset and a rate of their own and ping-pong samples
(`capture`), so that `load` reads what a GPU would have left: the dumps say backend cuda.

Injections, one class each (`cases`): SlowWork (a rank works longer, by ns or by a share), SlowWarp (one of its warps),
SlowPause (outside spans), MoreWork (more tokens), MovingWork (another rank in every iteration),
Latency and Drain (a link), LateHost (a gap before a rank's kernels). Every one can be confined to
some iterations. Noise is drawn by rank, warp and place in the program, so the same seed gives the same noise with and
without an injection.
"""

from simulator.cases import (
    Case,
    Drain,
    Injection,
    LateHost,
    Latency,
    MoreWork,
    MovingWork,
    Noise,
    Shape,
    SlowPause,
    SlowWarp,
    SlowWork,
)
from simulator.run import Truth, simulate

__all__ = [
    "Case",
    "Drain",
    "Injection",
    "LateHost",
    "Latency",
    "MoreWork",
    "MovingWork",
    "Noise",
    "Shape",
    "SlowPause",
    "SlowWarp",
    "SlowWork",
    "Truth",
    "simulate",
]
