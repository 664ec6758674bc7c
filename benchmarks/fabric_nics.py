"""Two networks against one: what the transfer engine makes of a second domain.

    python benchmarks/fabric_nics.py [--links 2] [--rate 2gbit] [--pairs 7]

Two hosts in namespaces (tests/fabric_hosts.py; needs root), joined by veth pairs that tbf(8) slows down to --rate each.
One engine of each host has the first link, another one all of them. They take turns with the same bytes; a ratio is of
two turns that follow each other.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from fabric_hosts import missing, run_on_hosts
from harness import Table, about_network, write_results

from tracekern.fabric import DoneFlag, Net, TransferEngine

NUM_BYTES = 32 << 20
GOALS = {2: 1.85, 4: 3.5}
LIMIT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument("--rate", default="2gbit")
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    if missing():
        print(f"fabric_nics: skipped: {missing()}", file=sys.stderr)
        return 2
    source = functools.partial(write_in_turns, pairs=options.pairs)
    target = functools.partial(receive_in_turns, pairs=options.pairs)
    (one, many), _ = run_on_hosts(source, target, num_links=options.links, rate=options.rate)
    ratios = [first / second for first, second in zip(one, many, strict=True)]
    ratio, goal = statistics.median(ratios), GOALS.get(options.links)
    columns = ["links", "one", "all", "ratio", "least..most", "goal", ""]
    table = Table(f"writes of {NUM_BYTES >> 20} MiB over links of {options.rate}, interleaved", columns)
    rates = [NUM_BYTES * 8 / statistics.median(seconds) / 1e9 for seconds in (one, many)]
    table.add(
        str(options.links),
        f"{rates[0]:.2f} Gbit/s",
        f"{rates[1]:.2f} Gbit/s",
        f"{ratio:.2f}",
        f"{min(ratios):.2f}..{max(ratios):.2f}",
        f">= {goal}" if goal else "",
        "missed" if goal and ratio < goal else "",
    )
    table.print()
    about = {
        **about_network("tcp"),
        "links": options.links,
        "rate": options.rate,
        "bytes": NUM_BYTES,
        "one_s": one,
        "all_s": many,
    }
    write_results(f"fabric_nics_{options.links}", {**about, "ratios": ratios, "ratio": ratio, "goal": goal})
    return 0


def make_engines(nets: list[Net]) -> list[TransferEngine]:
    return [TransferEngine.builder().add_domains(nets[:count]).build() for count in (1, len(nets))]


def write_in_turns(other: Connection, nets: list[Net], pairs: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each turn, with one link and with all."""
    memory = np.full(NUM_BYTES, 1, np.uint8)
    engines = make_engines(nets)
    sources = [engine.register_memory(memory.ctypes.data, NUM_BYTES, memory)[0] for engine in engines]
    targets = other.recv()
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(pairs + 1):  # the first makes the connections
        for number in sorted(range(2), reverse=turn % 2 == 0):
            done = DoneFlag()
            began = time.perf_counter()
            engines[number].submit_write(sources[number], targets[number], NUM_BYTES, on_done=done)
            done.wait(LIMIT_S)
            if turn:
                seconds[number].append(time.perf_counter() - began)
    other.send("done")
    for engine in engines:
        engine.stop()
    return seconds


def receive_in_turns(other: Connection, nets: list[Net], pairs: int) -> None:
    memory = np.zeros(NUM_BYTES, np.uint8)
    engines = make_engines(nets)
    other.send([engine.register_memory(memory.ctypes.data, NUM_BYTES, memory)[1] for engine in engines])
    other.recv()
    if not memory.all():
        raise RuntimeError("not every byte has arrived")
    for engine in engines:
        engine.stop()


if __name__ == "__main__":
    sys.exit(main())
