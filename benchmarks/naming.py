"""Who is named for what was injected: simulated runs of every shape, each with many seeds.

    python benchmarks/naming.py [--seeds 100] [--cases WORD ...]

Counts, for each case, how many runs name what was injected, name nothing, and name something else. Runs of
tests/simulator: ranks, links, hosts and clocks whose true times are known.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from harness import ROOT, Table, write_results

sys.path.insert(0, str(ROOT / "tests"))
from simulator import Case, Drain, LateHost, Latency, MovingWork, Shape, SlowWork, simulate  # noqa: E402

import tracekern  # noqa: E402
from tracekern.analysis.findings import analyze  # noqa: E402

RIGHT, NOTHING, WRONG = "right", "nothing", "wrong"


@dataclass(frozen=True)
class Naming:
    """What is injected into runs of the shapes, one after the other, and what is right to name."""

    text: str
    make: str
    """A function of this module: (rng, shape) -> (case, the right members; () for nothing)."""
    shapes: tuple[Shape, ...] = tuple(Shape)


Right = tuple[tuple[int, ...], ...]
_WITH_LINKS = tuple(shape for shape in Shape if shape is not Shape.BARRIER)
"""No wait at a barrier is for a single message."""
_ORDERED = (Shape.CHAIN, Shape.STREAM, Shape.CREDITS)


def _size(rng: np.random.Generator, shape: Shape) -> dict[str, int]:
    ranks = int(rng.choice([4, 6, 8] if shape is Shape.EXCHANGE else [4, 8, 16]))
    return {"num_ranks": ranks, "iterations": int(rng.choice([10, 20, 50]))}


def _rank(rng: np.random.Generator, shape: Shape, num_ranks: int) -> int:
    """One that others wait for: not the last of those that are in a row."""
    return int(rng.integers(num_ranks - 1 if shape in _ORDERED else num_ranks))


def _link(rng: np.random.Generator, shape: Shape, num_ranks: int) -> tuple[int, int]:
    source = _rank(rng, shape, num_ranks)
    if shape is Shape.EXCHANGE:
        return source, (source + int(rng.integers(1, num_ranks))) % num_ranks
    return source, (source + 1) % num_ranks


def nothing(rng: np.random.Generator, shape: Shape) -> tuple[Case, Right]:
    return Case(shape, noise=float(rng.choice([0.01, 0.03, 0.06])), **_size(rng, shape)), ()


def slow_rank(rng: np.random.Generator, shape: Shape) -> tuple[Case, Right]:
    size = _size(rng, shape)
    rank = _rank(rng, shape, size["num_ranks"])
    return Case(shape, injections=(SlowWork(5_000, rank=rank),), noise=0.05, **size), ((rank,),)


def three_percent(rng: np.random.Generator, shape: Shape) -> tuple[Case, Right]:
    rank = _rank(rng, shape, 8)
    slow = SlowWork(0, rank=rank, share=0.03)
    noise = float(rng.choice([0.01, 0.03]))
    return Case(shape, 8, 50, (slow,), noise=noise, work_ns=100_000), ((rank,),)


def two_ranks(rng: np.random.Generator, shape: Shape) -> tuple[Case, Right]:
    one, two = rng.choice(8, 2, replace=False).tolist()
    return Case(shape, 8, 50, (SlowWork(5_000, rank=one), SlowWork(5_000, rank=two)), noise=0.03), ((one,), (two,))


def slow_link(rng: np.random.Generator, shape: Shape) -> tuple[Case, Right]:
    size = _size(rng, shape)
    link = _link(rng, shape, size["num_ranks"])
    slow = (Latency if rng.random() < 0.5 else Drain)(5_000, source=link[0], destination=link[1])
    return Case(shape, injections=(slow,), noise=0.05, **size), (link,)


def late_host(rng: np.random.Generator, shape: Shape) -> tuple[Case, Right]:
    size, has_lane = _size(rng, shape), bool(rng.random() < 0.5)
    # In a chain only the first one's host is not hidden: the others' kernels wait for the rank before them.
    rank = 0 if shape is Shape.CHAIN else _rank(rng, shape, size["num_ranks"])
    return Case(shape, injections=(LateHost(5_000, rank=rank),), noise=0.05, has_host_lane=has_lane, **size), ((rank,),)


def one_event(rng: np.random.Generator, shape: Shape) -> tuple[Case, Right]:
    size = _size(rng, shape)
    rank = _rank(rng, shape, size["num_ranks"])
    event = SlowWork(50_000, rank=rank, iterations=(int(rng.integers(size["iterations"])),))
    return Case(shape, injections=(event,), noise=0.05, **size), ((rank,),)


def moving(rng: np.random.Generator, shape: Shape) -> tuple[Case, Right]:
    ranks = int(rng.choice([4, 8]))
    return Case(shape, ranks, 5 * ranks, (MovingWork(10_000, num_ranks=ranks),), noise=0.05), ()


def one_iteration(rng: np.random.Generator, shape: Shape) -> tuple[Case, Right]:
    return Case(shape, 8, 1, (SlowWork(10_000, rank=2),), noise=0.05), ()


def persistent(rng: np.random.Generator, shape: Shape) -> tuple[Case, Right]:
    size = _size(rng, shape)
    rank = _rank(rng, shape, size["num_ranks"])
    return Case(shape, injections=(SlowWork(5_000, rank=rank),), noise=0.05, is_persistent=True, **size), ((rank,),)


def on_cpu(rng: np.random.Generator, shape: Shape) -> tuple[Case, Right]:
    return Case(shape, 8, 20, (SlowWork(10_000, rank=2),), noise=0.05, backend="cpu"), ()


NAMINGS = (
    Naming("nothing injected, noise 1, 3 or 6 %", "nothing"),
    Naming("a rank works 5 us (25 %) longer, noise 5 %", "slow_rank"),
    Naming("a rank is 3 % slower, 50 iterations, noise 1 or 3 %", "three_percent"),
    Naming("two ranks work 5 us longer, 50 iterations", "two_ranks", (Shape.RING, Shape.EXCHANGE, Shape.BARRIER)),
    Naming("a link takes 5 us longer, noise 5 %", "slow_link", _WITH_LINKS),
    Naming("a host launches 5 us late, noise 5 %", "late_host"),
    Naming("50 us in one iteration of one rank", "one_event"),
    Naming("10 us, on another rank in each iteration", "moving"),
    Naming("10 us, one iteration on record", "one_iteration"),
    Naming("5 us in a persistent kernel", "persistent"),
    Naming("10 us, on the CPU backend", "on_cpu"),
)


def judge(naming: Naming, seed: int) -> str:
    """What one run names: RIGHT, NOTHING or WRONG."""
    rng = np.random.default_rng([seed, *naming.make.encode()])
    case, right = globals()[naming.make](rng, naming.shapes[seed % len(naming.shapes)])
    directory = Path(tempfile.mkdtemp(prefix="naming-"))
    try:
        culprit = analyze(tracekern.load(simulate(case, seed, directory).directory)).culprit
    finally:
        shutil.rmtree(directory)
    named = named_by(culprit)
    if not named:
        return NOTHING
    return RIGHT if set(named) == set(right) else WRONG


def named_by(culprit: object) -> Right:
    """Ranks and links; of versions that could name one rank only, that one."""
    if (members := getattr(culprit, "members", None)) is not None:
        return tuple(map(tuple, members))
    rank = getattr(culprit, "rank", None)
    return () if rank is None else ((rank,),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed")
    parser.add_argument("--cases", nargs="*", default=[naming.make for naming in NAMINGS])
    parser.add_argument("--name", default="naming", help="of the file of results")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    table = Table(f"of {options.seeds} runs each", ["case", RIGHT, NOTHING, WRONG])
    rows = []
    with ProcessPoolExecutor(2) as pool:
        for naming in (entry for entry in NAMINGS if entry.make in options.cases):
            counts = Counter(pool.map(partial(judge, naming), seeds))
            rows.append({"case": naming.text, **{word: counts[word] for word in (RIGHT, NOTHING, WRONG)}})
            table.add(naming.text, *(str(counts[word]) for word in (RIGHT, NOTHING, WRONG)))
    table.print()
    write_results(options.name, {"seeds": [seeds.start, seeds.stop], "rows": rows})


if __name__ == "__main__":
    main()
