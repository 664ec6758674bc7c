"""Weights for RL: four training ranks write to the memory of two inference ranks, which call nothing.

    python examples/weights/main.py [--provider tcp|shm] [--through-rank-0] [-o weights-capture]
    tracekern report weights-capture

Each version is copied, prepared (fused, and bf16 to fp8), written, and closed by a barrier of each group's mesh, in
stages that overlap. Every byte at the inference ranks is compared with the same computation done plainly. Exits with 0
where all are equal, with 1 where not, and with 2 where a rank was lost.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.weights.controller import Ranks
from examples.weights.ways import Options
from tracekern import TracekernError


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--through-rank-0", choices=("broadcast", "parts"), nargs="?", const="broadcast", default="")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--slots", type=int, default=3, help="groups that a rank may have under way")
    parser.add_argument("--versions", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="record a capture of all versions but the first")
    return parser.parse_args()


def main() -> int:
    given = parse_options()
    options = Options(
        given.provider, given.layers, given.hidden, slots=given.slots, through_rank_0=given.through_rank_0
    )
    try:
        wrong = run(options, given.versions, given.output)
    except (TracekernError, ValueError) as error:
        print(f"weights: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 1 if wrong else 0


def run(options: Options, versions: int, output: Path | None) -> int:
    """Sends versions one after the other. Returns how many bytes were wrong."""
    schedule = options.schedule
    num_writes = sum(len(group.writes) for groups in schedule.ranks.values() for group in groups)
    num_bytes = schedule.num_bytes * options.num_inference
    print(f"{num_writes} writes a version, {num_bytes / 1e6:.1f} MB, every byte of the inference ranks once")
    total_wrong = 0
    with Ranks(options, command=shlex.join(["examples/weights/main.py", *sys.argv[1:]])) as ranks:
        print(f"slots take {max(ranks.slot_bytes) / 1e6:.1f} MB at most on a training rank")
        for version in range(1, versions + 1):
            ranks.train(version)
            if output and version == min(2, versions):  # peers have met, and memory has its pages
                ranks.record(output)
            seconds = ranks.send(version)
            if output and version == versions:
                ranks.close()
            wrong = ranks.check(version)
            total_wrong += wrong
            rate = num_bytes / seconds / 1e9
            told = f"{wrong} bytes are WRONG" if wrong else "every byte is right"
            print(f"version {version}: {seconds * 1e3:.1f} ms, {rate:.2f} GB/s; {told}")
    return total_wrong


if __name__ == "__main__":
    sys.exit(main())
