"""The simulated runs that causes.py judges: fixed cases, and random ones with a cause or with none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from simulator import (
    Case,
    Drain,
    ExtraKernel,
    Injection,
    LateHost,
    Latency,
    LatencyOut,
    MoreWork,
    Noise,
    Shape,
    SlowPause,
    SlowWarp,
    SlowWork,
    SmallRing,
)

from tracekern.analysis.why.candidates import Candidate, CauseKind

DELAY_NS = 5_000
_JUMPS_NS = (300, 3_000, 20_000)
_MOST_PEERS, _MOST_PIPELINED = 16, 8
"""Ranks of an exchange and of a pipeline: their events grow with the square of them."""
_SINGLE_RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Row:
    name: str
    case: Case
    names_nobody: bool = False


def cost_cases() -> list[Row]:
    """Returns fixed cases. They were written beside the analysis, which was tuned on some of them."""
    slow, late = SlowWork(DELAY_NS, rank=1), LateHost(20 * DELAY_NS, rank=1)
    latency, drain = (kind(DELAY_NS, source=1, destination=3) for kind in (Latency, Drain))
    real = Case(Shape.PIPELINE, 4, 10, num_warps=128)
    once = SlowWork(40 * DELAY_NS, rank=1, iterations=(4,))
    all_but_one = tuple(SlowWork(2 * DELAY_NS, rank=rank) for rank in range(8) if rank != 4)
    rows = [
        *(
            Row(f"chain of {n}", Case(Shape.CHAIN, n, 10, (SlowWork(DELAY_NS + 200 * n, rank=0),)))
            for n in (2, 8, 16, 32)
        ),
        *(Row(f"stream of {n}", Case(Shape.STREAM, n, 20, (SlowWork(DELAY_NS, rank=0),))) for n in (2, 8, 32)),
        Row("ring", Case(Shape.RING, 8, 10, (slow,))),
        Row("ring, 20 us more", Case(Shape.RING, 8, 10, (SlowWork(4 * DELAY_NS, rank=1),))),
        Row("credits", Case(Shape.CREDITS, 8, 50, (slow,))),
        Row("small rings", Case(Shape.CREDITS, 8, 50, (SmallRing(slots=1),), window=0, is_persistent=True)),
        Row("barrier of 32", Case(Shape.BARRIER, 32, 10, (slow,))),
        Row("exchange", Case(Shape.EXCHANGE, 8, 10, (slow,))),
        Row("persistent stream", Case(Shape.STREAM, 8, 50, (slow,), is_persistent=True)),
        Row("persistent ring", Case(Shape.RING, 8, 50, (slow,), is_persistent=True)),
        Row("persistent credits", Case(Shape.CREDITS, 8, 50, (slow,), is_persistent=True)),
        Row("persistent exchange", Case(Shape.EXCHANGE, 4, 20, (slow,), is_persistent=True)),
        Row("once, persistent ring", Case(Shape.RING, 8, 50, (once,), is_persistent=True)),
        Row("once, exchange", Case(Shape.EXCHANGE, 4, 10, (once,))),
        Row("in 2 of 50", Case(Shape.BARRIER, 8, 50, (replace(once, iterations=(13, 37)),))),
        *_sets_and_patterns(),
        Row("late host, exchange", Case(Shape.EXCHANGE, 4, 10, (late,))),
        Row("late host, barrier", Case(Shape.BARRIER, 8, 10, (LateHost(DELAY_NS, rank=1),))),
        Row("slow flags", Case(Shape.EXCHANGE, 4, 20, (latency,))),
        Row("slow stores", Case(Shape.EXCHANGE, 4, 10, (drain,))),
        Row("slow stores, persistent", Case(Shape.EXCHANGE, 4, 20, (drain,), is_persistent=True)),
        Row("outside spans", Case(Shape.BARRIER, 4, 10, (SlowPause(DELAY_NS, rank=2),), pause_ns=3_000)),
        Row("real: slow rank", replace(real, injections=(SlowWork(1_000, rank=1),))),
        Row("real: slow warp", replace(real, injections=(SlowWarp(DELAY_NS, rank=1, warp=0),))),
        Row("real: slow warp, not the polling one", replace(real, injections=(SlowWarp(DELAY_NS, rank=1, warp=77),))),
        Row("real: more tokens", replace(real, injections=(MoreWork(rank=1),))),
        Row("real: late host that synchronises", replace(real, injections=(late,), launch_ns=10_000)),
        Row("real: late host, others ahead", replace(real, injections=(late,))),
        Row("real: uneven tokens, late host", replace(real, injections=(late,), is_uneven=True)),
        Row("real: slow stores", replace(real, injections=(drain,))),
        Row("real: once", replace(real, injections=(once,))),
        Row("real: uneven tokens, nothing slow", replace(real, is_uneven=True), names_nobody=True),
        Row("real: uneven tokens, one has more", replace(real, injections=(MoreWork(rank=1),), is_uneven=True)),
        Row("all slow but rank 4, barrier", Case(Shape.BARRIER, 8, 20, all_but_one), names_nobody=True),
        Row("all slow but rank 4, exchange", Case(Shape.EXCHANGE, 8, 20, all_but_one), names_nobody=True),
        *_ahead(real),
        Row("two late hosts", Case(Shape.EXCHANGE, 6, 10, (late, LateHost(14 * DELAY_NS, rank=2)))),
        Row("two slow ranks", Case(Shape.BARRIER, 8, 20, (slow, SlowWork(DELAY_NS, rank=5)))),
        Row(
            "slow rank hides a late host",
            Case(Shape.RING, 8, 20, (SlowWork(4 * DELAY_NS, rank=1), LateHost(2 * DELAY_NS, rank=5))),
        ),
        Row(
            "slow link hides a slow rank",
            Case(Shape.EXCHANGE, 4, 20, (Drain(2 * DELAY_NS, source=1, destination=3), SlowWork(DELAY_NS, rank=0))),
        ),
    ]
    return [replace(row, case=replace(row.case, noise=noise)) for noise in (0.0, 0.05) for row in rows]


def _sets_and_patterns() -> list[Row]:
    """Several ranks or links alike, and causes that come and go."""
    half = tuple(SlowWork(DELAY_NS, rank=rank) for rank in (0, 2, 5, 7))
    several = tuple(SlowWork(DELAY_NS, rank=rank) for rank in (1, 4, 6, 9, 12))
    late, every = tuple(range(12, 30)), tuple(range(1, 30, 4))
    return [
        Row("5 of 16 ranks", Case(Shape.BARRIER, 16, 12, several)),
        Row("all links out of a rank", Case(Shape.EXCHANGE, 8, 12, (LatencyOut(4 * DELAY_NS, ranks=(5,)),))),
        Row("from iteration 12 on", Case(Shape.BARRIER, 8, 30, (SlowWork(DELAY_NS, rank=2, iterations=late),))),
        Row("every 4th iteration", Case(Shape.BARRIER, 8, 30, (SlowWork(3 * DELAY_NS, rank=2, iterations=every),))),
        Row("half of the ranks", Case(Shape.BARRIER, 8, 12, half), names_nobody=True),
    ]


def _ahead(real: Case) -> list[Row]:
    """Hosts that wait for nothing. The first and the last two launch more slowly than the device works."""
    ahead = {"hosts_run_ahead": True, "has_host_lane": True}
    slower, later = SlowWork(2 * DELAY_NS, rank=1), LateHost(4 * DELAY_NS, rank=1)
    late = LateHost(20 * DELAY_NS, rank=1)
    return [
        Row("hosts ahead, slow rank", Case(Shape.BARRIER, 4, 20, (slower,), launch_ns=28_000, **ahead)),
        Row("hosts ahead, late host", Case(Shape.BARRIER, 4, 20, (later,), launch_ns=28_000, **ahead)),
        Row("hosts ahead in time, slow rank", Case(Shape.EXCHANGE, 4, 20, (slower,), launch_ns=3_000, **ahead)),
        Row("hosts ahead in time, late host", Case(Shape.EXCHANGE, 4, 20, (later,), launch_ns=7_000, **ahead)),
        Row(
            "real: hosts ahead, slow rank",
            replace(real, injections=(SlowWork(3_000, rank=1),), launch_ns=12_000, **ahead),
        ),
        Row("real: hosts ahead, late host", replace(real, injections=(late,), launch_ns=12_000, **ahead)),
    ]


def candidates_of(case: Case) -> set[Candidate]:
    """Returns the candidates that are right to name, each rank of a set by itself."""
    right = set()
    for entry in case.injections:
        if isinstance(entry, (Latency, Drain)):
            right.add(Candidate(CauseKind.LINK, entry.source, entry.destination))
        elif isinstance(entry, LatencyOut):
            right |= {Candidate(CauseKind.LINKS_OUT, rank) for rank in entry.ranks}
        elif isinstance(entry, SmallRing):
            right.add(Candidate(CauseKind.RING, -1, channel="room"))
        else:
            kinds = {LateHost: CauseKind.HOST, MoreWork: CauseKind.AMOUNT, ExtraKernel: CauseKind.EXTRA}
            right.add(Candidate(kinds.get(type(entry), CauseKind.PACE), entry.rank))
    return {as_link(one) for one in right} if case.num_ranks == 2 else right


def as_link(one: Candidate) -> Candidate:
    """Returns the only link that all links out of, or into, one of two ranks are."""
    ends = {CauseKind.LINKS_OUT: (one.rank, 1 - one.rank), CauseKind.LINKS_IN: (1 - one.rank, one.rank)}
    return Candidate(CauseKind.LINK, *ends[one.kind]) if one.kind in ends else one


# ---- random runs; rng draws all of a run but its noise ----

Rng = np.random.Generator


def _some_ns(rng: Rng, least: float, most: float) -> int:
    return int(np.exp(rng.uniform(np.log(least), np.log(most))))


def _base(rng: Rng, shapes: tuple[Shape, ...], num_ranks: int, iterations: tuple[int, ...] = (10, 12, 20, 30)) -> Case:
    """Draws a run without any cause, of one of the shapes that are not too large for so many ranks."""
    most = {Shape.EXCHANGE: _MOST_PEERS, Shape.PIPELINE: _MOST_PIPELINED}
    fitting = [shape for shape in shapes if num_ranks <= most.get(shape, num_ranks)] or [Shape.BARRIER]
    shape = fitting[rng.integers(len(fitting))]
    return Case(
        shape,
        num_ranks,
        int(rng.choice(iterations)),
        noise=float(rng.uniform(0.0, 0.05)),
        noise_kind=list(Noise)[rng.integers(len(Noise))],
        num_warps=16 if shape is Shape.PIPELINE else 0,
    )


_ANY = tuple(shape for shape in Shape if shape not in (Shape.STREAM, Shape.CREDITS, Shape.STREAMS))
_MESSAGES = Shape.EXCHANGE, Shape.PIPELINE
_CHAINS = Shape.STREAM, Shape.CREDITS


def _slow_rank(rng: Rng, num_ranks: int) -> Case:
    case = _base(rng, _ANY, num_ranks)
    slow = SlowWork(rank=int(rng.integers(num_ranks)), share=float(rng.uniform(0.25, 2)))
    return replace(case, injections=(slow,), is_persistent=bool(rng.random() < 0.2))


def _slow_in_chain(rng: Rng, num_ranks: int) -> Case:
    case = _base(rng, _CHAINS, num_ranks, (20, 50))
    return replace(case, injections=(SlowWork(rank=int(rng.integers(num_ranks)), share=float(rng.uniform(0.25, 2))),))


def _slow_warp(rng: Rng, num_ranks: int) -> Case:
    case = _base(rng, (Shape.PIPELINE, Shape.EXCHANGE), min(max(num_ranks, 3), _MOST_PEERS))
    warp = int(rng.integers(case.num_warps or case.num_ranks - 1))
    rank = int(rng.integers(case.num_ranks))
    return replace(case, injections=(SlowWarp(rank=rank, warp=warp, share=float(rng.uniform(0.5, 2))),))


def _slow_pause(rng: Rng, num_ranks: int) -> Case:
    case = replace(_base(rng, (Shape.BARRIER, Shape.PIPELINE), num_ranks), pause_ns=3_000)
    return replace(case, injections=(SlowPause(_some_ns(rng, 2_000, 20_000), rank=int(rng.integers(num_ranks))),))


def _more_work(rng: Rng, num_ranks: int) -> Case:
    num_ranks = min(num_ranks, _MOST_PIPELINED)
    case = replace(_base(rng, (Shape.PIPELINE,), num_ranks), is_uneven=bool(rng.random() < 0.5))
    more = MoreWork(rank=int(rng.integers(num_ranks)), pieces=int(rng.integers(1, 4)))
    return replace(case, injections=(more,))


def _extra_kernel(rng: Rng, num_ranks: int) -> Case:
    extra = ExtraKernel(_some_ns(rng, 5_000, 40_000), rank=int(rng.integers(num_ranks)))
    return replace(_base(rng, _ANY, num_ranks), injections=(extra,))


def _late_host(rng: Rng, num_ranks: int) -> Case:
    late = LateHost(_some_ns(rng, 5_000, 100_000), rank=int(rng.integers(num_ranks)))
    how = {"has_host_lane": bool(rng.random() < 0.5), "launch_ns": int(rng.choice([0, 5_000]))}
    return replace(_base(rng, _ANY, num_ranks), injections=(late,), **how)


def _slow_flags(rng: Rng, num_ranks: int) -> Case:
    return _of_link(rng, min(num_ranks, _MOST_PEERS), Latency, _MESSAGES)


def _slow_stores(rng: Rng, num_ranks: int) -> Case:
    return _of_link(rng, min(num_ranks, _MOST_PEERS), Drain, _MESSAGES)


def _of_link(rng: Rng, num_ranks: int, kind: type[Latency | Drain], shapes: tuple[Shape, ...]) -> Case:
    source, destination = (int(rank) for rank in rng.choice(num_ranks, 2, replace=False))
    slow = kind(_some_ns(rng, 4_000, 30_000), source=source, destination=destination)
    return replace(_base(rng, shapes, num_ranks), injections=(slow,))


def _links_out(rng: Rng, num_ranks: int) -> Case:
    num_ranks = min(num_ranks, _MOST_PEERS)
    slow = LatencyOut(_some_ns(rng, 4_000, 30_000), ranks=(int(rng.integers(num_ranks)),))
    return replace(_base(rng, _MESSAGES, num_ranks), injections=(slow,))


def _link_of_barrier(rng: Rng, num_ranks: int) -> Case:
    return _of_link(rng, num_ranks, (Latency, Drain)[rng.integers(2)], (Shape.BARRIER,))


def _slow_stream(rng: Rng, num_ranks: int) -> Case:
    """The exchange, or what runs beside it."""
    slow = SlowWarp(rank=int(rng.integers(num_ranks)), warp=int(rng.integers(2)), share=float(rng.uniform(0.8, 3)))
    return replace(_base(rng, (Shape.STREAMS,), num_ranks), injections=(slow,))


def _small_ring(rng: Rng, num_ranks: int) -> Case:
    ring = SmallRing(slots=int(rng.integers(1, 4)))
    case = replace(_base(rng, (Shape.CREDITS,), num_ranks, (20, 50)), noise=float(rng.uniform(0.02, 0.3)), window=0)
    return replace(case, injections=(ring,), is_persistent=bool(rng.random() < 0.5))


def _ahead_slow_rank(rng: Rng, num_ranks: int) -> Case:
    case = replace(_slow_rank(rng, num_ranks), is_persistent=False)
    return replace(case, hosts_run_ahead=True, has_host_lane=True, launch_ns=int(rng.choice([3_000, 7_000, 12_000])))


def _once(rng: Rng, num_ranks: int) -> Case:
    """Once or twice, far longer than all else."""
    case = _base(rng, _ANY, num_ranks)
    when = tuple(sorted(int(one) for one in rng.choice(case.iterations, int(rng.integers(1, 3)), replace=False)))
    kind = (SlowWork, LateHost)[rng.integers(2)]
    return replace(
        case, injections=(kind(_some_ns(rng, 1e5, 4e5), rank=int(rng.integers(num_ranks)), iterations=when),)
    )


SINGLES: dict[str, Callable[[Rng, int], Case]] = {
    "slow rank": _slow_rank,
    "slow rank of a chain": _slow_in_chain,
    "slow warp": _slow_warp,
    "outside spans": _slow_pause,
    "more work": _more_work,
    "extra kernel": _extra_kernel,
    "late host": _late_host,
    "slow flags": _slow_flags,
    "slow stores": _slow_stores,
    "all links out": _links_out,
    "link of a barrier": _link_of_barrier,
    "slow stream of two": _slow_stream,
    "small ring": _small_ring,
    "hosts ahead, slow rank": _ahead_slow_rank,
    "once": _once,
}


def _set_of(rng: Rng, make: Callable[[int], Injection], shapes: tuple[Shape, ...]) -> Case:
    num_ranks = int(rng.choice([6, 8, 12, 16, 24, 32]))
    count = int(rng.integers(2, (num_ranks + 1) // 2))
    members = sorted(rng.choice(num_ranks, count, replace=False).tolist())
    return replace(_base(rng, shapes, num_ranks), injections=tuple(make(rank) for rank in members))


def _slow_set(rng: Rng) -> Case:
    share = float(rng.uniform(0.25, 2))
    return _set_of(rng, lambda rank: SlowWork(rank=rank, share=share), (Shape.BARRIER, Shape.EXCHANGE, Shape.PIPELINE))


def _late_set(rng: Rng) -> Case:
    late_ns = _some_ns(rng, 5_000, 100_000)
    case = _set_of(rng, lambda rank: LateHost(late_ns, rank=rank), (Shape.BARRIER, Shape.EXCHANGE))
    return replace(case, has_host_lane=bool(rng.random() < 0.5))


def _nodes(rng: Rng, shapes: tuple[Shape, ...], sizes: tuple[int, ...]) -> tuple[Case, tuple[int, ...]]:
    """Draws a run of three or four nodes, and the ranks of one of them."""
    num_nodes, ranks_per_node = int(rng.choice([3, 4])), int(rng.choice(sizes))
    case = _base(rng, shapes, num_nodes * ranks_per_node)
    node = int(rng.integers(num_nodes))
    ranks = tuple(range(node * ranks_per_node, (node + 1) * ranks_per_node))
    return replace(case, ranks_per_node=ranks_per_node), ranks


def _slow_node(rng: Rng) -> Case:
    (case, ranks), share = _nodes(rng, (Shape.BARRIER, Shape.EXCHANGE), (2, 4, 8)), float(rng.uniform(0.25, 2))
    return replace(case, injections=tuple(SlowWork(rank=rank, share=share) for rank in ranks))


def _slow_network(rng: Rng) -> Case:
    case, ranks = _nodes(rng, (Shape.EXCHANGE,), (2, 4))
    return replace(case, injections=(LatencyOut(_some_ns(rng, 6_000, 30_000), ranks=ranks),))


def _confined(rng: Rng, choose: Callable[[Rng, int], tuple[int, ...]]) -> Case:
    """Draws a single cause that is there in some iterations only."""
    kinds = _slow_rank, _extra_kernel, _late_host, _slow_flags
    case = kinds[rng.integers(len(kinds))](rng, int(rng.choice([4, 6, 8, 12])))
    case = replace(case, iterations=int(rng.choice([24, 30, 50])))
    (entry,) = case.injections
    return replace(case, injections=(replace(entry, iterations=choose(rng, case.iterations)),))


def _until(rng: Rng) -> Case:
    return _confined(rng, lambda rng, count: tuple(range(int(rng.integers(count // 4, 3 * count // 4)))))


def _from(rng: Rng) -> Case:
    return _confined(rng, lambda rng, count: tuple(range(int(rng.integers(count // 4, 3 * count // 4)), count)))


def _every(rng: Rng) -> Case:
    def choose(rng: Rng, count: int) -> tuple[int, ...]:
        stride = int(rng.integers(2, 6))
        return tuple(range(int(rng.integers(stride)), count, stride))

    return _confined(rng, choose)


SETS: dict[str, Callable[[Rng], Case]] = {
    "slow ranks": _slow_set,
    "late hosts": _late_set,
    "slow node": _slow_node,
    "all links out of a node": _slow_network,
    "until an iteration": _until,
    "from an iteration on": _from,
    "every 2nd to 5th iteration": _every,
}


def draw_single(number: int) -> tuple[str, Case]:
    """Returns the kind, and the run, with that number."""
    rng = np.random.default_rng([number, 1])
    kind = list(SINGLES)[number % len(SINGLES)]
    return kind, SINGLES[kind](rng, int(rng.choice(_SINGLE_RANKS)))


def draw_set(number: int) -> tuple[str, Case]:
    kind = list(SETS)[number % len(SETS)]
    return kind, SETS[kind](np.random.default_rng([number, 2]))


JUMPS = "a clock jumps"
ALIKE: dict[str, Callable[[Rng], dict[str, Any]]] = {
    "standard": lambda rng: {},
    "jitter": lambda rng: {"has_host_jitter": True, "is_persistent": False},
    "ahead": lambda rng: {
        "hosts_run_ahead": True,
        "has_host_lane": True,
        "is_persistent": False,
        "launch_ns": int(rng.choice([3_000, 7_000, 12_000, 28_000])),
    },
    "outliers": lambda rng: {"outliers": 1 / float(rng.uniform(200, 500))},
    "wandering": lambda rng: _wandering(rng),
    "wandering, 8 iterations": lambda rng: {**_wandering(rng), "iterations": 8},
    JUMPS: lambda rng: {
        "noise": 0.03,
        "noise_kind": Noise.NORMAL,
        "jump_ns": int(rng.choice(_JUMPS_NS)),
    },
}
"""Runs without a cause: what they vary by."""


def _wandering(rng: Rng) -> dict[str, Any]:
    share = float(rng.choice([0.02, 0.05, 0.1]))
    return {"noise": 0.01, "noise_kind": Noise.NORMAL, "wander": float(rng.uniform(0.7, 0.95)), "wander_share": share}


def draw_alike(kind: str, num_ranks: int, number: int) -> Case:
    """Returns a run in which all ranks are alike."""
    rng = np.random.default_rng([number, num_ranks, 42])
    shapes = tuple(shape for shape in Shape if num_ranks <= _MOST_PEERS or shape is not Shape.EXCHANGE)
    case = _base(rng, shapes, num_ranks, (8, 10, 20, 50) if num_ranks <= _MOST_PEERS else (8, 10, 20))
    case = replace(
        case,
        noise=float(rng.choice([0.01, 0.03, 0.06, 0.15])),
        launch_ns=int(rng.choice([0, 10_000])),
        is_persistent=bool(rng.random() < 0.2) and case.shape is not Shape.STREAMS,
        is_uneven=bool(rng.random() < 0.5),
        window=0,  # small rings cost time even where all ranks are alike
    )
    return replace(case, **ALIKE[kind](rng))
