"""New weights for inference ranks: written by all training ranks, against gathered and sent by rank 0.

    python benchmarks/weights.py [--rate 400mbit] [--layers 8] [--rounds 5] [--record DIRECTORY]

Six hosts in namespaces at one switch (tests/fabric_switch.py; needs root): four have a training rank each, two an
inference rank each, and every NIC sends and receives at --rate. The three ways take turns with the same model, engine,
slots and stages (examples/weights), so that a ratio is of turns that follow each other:

- direct: each training rank prepares its shards and writes them to both inference ranks;
- broadcast: they write bf16 to rank 0, which prepares all of it and writes all of it to each inference rank;
- parts: the same, but rank 0 writes to each inference rank its part only, which no broadcast does.

The goal is that broadcast takes 2.5 times as long as direct. --record measures nothing, and leaves a capture of one
version, direct, in DIRECTORY, and of a broadcast in DIRECTORY_broadcast.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fabric_switch import Hosts, missing
from harness import Table, about_network, write_results

from examples.weights.controller import Ranks
from examples.weights.ranks import Place
from examples.weights.ways import Options
from tracekern.dump.format import dump_file_name
from tracekern.dump.reader import peek_metadata
from tracekern.segment.manifest import write_manifest

WAYS = {"direct": "", "broadcast": "broadcast", "parts": "parts"}
GOAL = 2.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", metavar="DIRECTORY", default="")
    options = parser.parse_args()
    if missing():
        print(f"weights: skipped: {missing()}", file=sys.stderr)
        return 2
    runs = {way: Options("tcp", options.layers, options.hidden, through_rank_0=WAYS[way]) for way in WAYS}
    if options.record:
        return record({way: runs[way] for way in ("direct", "broadcast")}, options.rate, options.record)
    seconds, wrong = measure(runs, options.rate, options.rounds)
    ratios = {way: [one / other for one, other in zip(seconds[way], seconds["direct"], strict=True)] for way in WAYS}
    table = Table(
        f"{options.layers} layers, hidden {options.hidden}: seconds for a version; NICs of {options.rate}",
        ["way", "MB to each", "median", "least..most", "of direct", "least..most", "goal"],
    )
    for way, run in runs.items():
        spread = [f"{min(values):.2f}..{max(values):.2f}" for values in (seconds[way], ratios[way])]
        medians = [statistics.median(values) for values in (seconds[way], ratios[way])]
        goal = f">= {GOAL}" if way == "broadcast" else ""
        size = f"{run.schedule.num_bytes / 1e6:.1f}"
        table.add(way, size, f"{medians[0]:.2f}", spread[0], f"{medians[1]:.2f}", spread[1], goal)
    table.print()
    rows = [
        {
            "way": way,
            "bytes_to_each": runs[way].schedule.num_bytes,
            "seconds": seconds[way],
            "median_s": statistics.median(seconds[way]),
            "ratios": ratios[way],
            "ratio": statistics.median(ratios[way]),
            "wrong_bytes": wrong[way],
        }
        for way in WAYS
    ]
    about = {
        **about_network("tcp"),
        "rate": options.rate,
        "layers": options.layers,
        "hidden": options.hidden,
        "slots": runs["direct"].slots,
    }
    write_results("weights", {**about, "rows": rows})
    return int(any(wrong.values()) or statistics.median(ratios["broadcast"]) < GOAL)


def measure(runs: dict[str, Options], rate: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Returns the seconds of each way's versions, and how many bytes of its last one were wrong."""
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    with contextlib.ExitStack() as stack:
        places = make_places(stack, rate)
        ranks = {way: stack.enter_context(Ranks(run, places)) for way, run in runs.items()}
        for version in range(1, rounds + 2):  # the first makes the connections
            for each in ranks.values():
                each.train(version)
            for way in sorted(ranks, reverse=version % 2 == 0):
                took = ranks[way].send(version)
                if version > 1:
                    seconds[way].append(took)
        return seconds, {way: each.check(rounds + 1) for way, each in ranks.items()}


def record(runs: dict[str, Options], rate: str, directory: str) -> int:
    """Leaves a capture of the second version of each way. Returns 1 where a byte of one is wrong."""
    wrong = 0
    with contextlib.ExitStack() as stack:
        places = make_places(stack, rate)
        for way, run in runs.items():
            place = Path(directory if way == "direct" else f"{directory}_{way}")
            command = shlex.join(["benchmarks/weights.py", *sys.argv[1:]])
            with Ranks(run, places, command) as ranks:
                for version in (1, 2):
                    ranks.train(version)
                    if version == 2:
                        ranks.record(place)
                    seconds = ranks.send(version)
                ranks.close()
                write_manifest(place, peek_metadata(place / dump_file_name(0))["run_id"])
                wrong += ranks.check(version)
            print(f"{way}: {seconds * 1e3:.1f} ms -> {place}")
    return int(wrong > 0)


def make_places(stack: contextlib.ExitStack, rate: str) -> list[Place]:
    """A host for each rank, until the stack is closed."""
    num_ranks = Options.num_training + Options.num_inference
    hosts = stack.enter_context(Hosts(num_ranks, rate))
    return [Place(hosts.net(host), hosts.enter(host)) for host in range(num_ranks)]


if __name__ == "__main__":
    sys.exit(main())
