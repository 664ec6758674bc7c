"""In which order the ranks of a capture serve their peers, as a picture: who all send to at the same time.

    tracekern run moe --variant reduce --ranks 8 ... -o after
    python benchmarks/visits.py before=CAPTURE after=CAPTURE -o docs/visits.svg

For each capture a panel. Across: how far a rank is with its sends, the same step for all ranks; down: the receivers;
the darker, the larger the share of all ranks' sends at that step that go to this receiver. Order alone is read, never
times, so captures of the CPU backend will do. The JSON has for each capture the largest share of one receiver in a
sixteenth of the way; fair is 1 / ranks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness import Table, write_results

import tracekern
from tracekern.timeline.model import Timeline, field_values

STEPS = 64
PARTS = 16
SENDS = ("send_partial", "send_result")
CELL, GAP, LEFT, TOP = 7, 50, 62, 40
"""Of the picture, in pixels: width of a step, room between panels, room for the receivers' names and for titles."""


def shares(timeline: Timeline, steps: int) -> npt.NDArray[np.float64]:
    """[receiver, step]: the share of the sends of all ranks that go to a receiver while the ranks are at that step."""
    num_ranks = len(timeline.ranks)
    counts = np.zeros((num_ranks, steps))
    spans = timeline.spans
    for number, event in enumerate(timeline.events):
        if event.name not in SENDS:
            continue
        rows = np.flatnonzero(spans.event == number)
        receiver = field_values(event, "peer", spans, rows)
        assert receiver is not None
        for launch in np.unique(spans.launch[rows]):  # of one rank
            mine = np.flatnonzero(spans.launch[rows] == launch)
            order = mine[np.argsort(spans.start[rows[mine]], kind="stable")]
            step = np.arange(len(order)) * steps // len(order)
            # Each rank counts as much as any other, however much it has to send.
            np.add.at(counts, (receiver[order], step), steps / len(order))
    return counts / counts.sum(axis=0)


def draw(panels: dict[str, npt.NDArray[np.float64]]) -> str:
    """The picture as SVG."""
    num_ranks, steps = next(iter(panels.values())).shape
    row, width = 22, steps * CELL
    total = LEFT + len(panels) * (width + GAP)
    height = TOP + num_ranks * row + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" font-family="sans-serif" '
        'font-size="13"><rect width="100%" height="100%" fill="white"/>'
    ]
    for index, (name, share) in enumerate(panels.items()):
        left = LEFT + index * (width + GAP)
        parts.append(f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{name}</text>')
        for receiver in range(num_ranks):
            y = TOP + receiver * row
            parts.append(f'<text x="{left - 6}" y="{y + 15}" text-anchor="end">to {receiver}</text>')
            for step in range(steps):
                opacity = min(1.0, float(share[receiver, step]))
                parts.append(
                    f'<rect x="{left + step * CELL}" y="{y}" width="{CELL}" height="{row - 2}" fill="#b3261e" '
                    f'fill-opacity="{opacity:.2f}"/>'
                )
        below = TOP + num_ranks * row
        parts.append(
            f'<rect x="{left}" y="{TOP}" width="{width}" height="{num_ranks * row - 2}" fill="none" stroke="#888"/>'
        )
        parts.append(f'<text x="{left}" y="{below + 18}">first send of each rank</text>')
        parts.append(f'<text x="{left + width}" y="{below + 18}" text-anchor="end">last</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", nargs="+", metavar="NAME=CAPTURE")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    panels, results = {}, {}
    table = Table("largest share of one receiver in a sixteenth of the way", ["capture", "ranks", "fair", "share"])
    for given in options.captures:
        name, _, directory = given.partition("=")
        timeline = tracekern.load(directory)
        panels[name] = shares(timeline, STEPS)
        most = float(shares(timeline, PARTS).max())
        num_ranks = len(timeline.ranks)
        results[name] = {"ranks": num_ranks, "largest_share": most}
        table.add(name, str(num_ranks), f"{1 / num_ranks:.3f}", f"{most:.3f}")
    table.print()
    options.output.write_text(draw(panels))
    about: dict[str, Any] = {"captures": results}
    write_results("visits", about, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
