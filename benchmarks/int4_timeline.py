"""K2 of int4 experts step by step, as a picture: the contract's timeline, and that of a warp of each way of staging.

    python benchmarks/int4_timeline.py --record cpu pinned-capture direct-capture -o docs/int4_steps.svg

Without --record the captures are those that are there. Recorded is block 0 of a call at hidden 7168, of which tile 0 is
on record step by step, in cycles; on a GPU the others have 512 tiles more to do, at intermediate 2048. Drawn is the
first sweep of warp 0: how it begins, and a part of its middle.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tracekern
from tracekern.timeline.model import Timeline

STAGINGS = ("pinned", "direct")
HIDDEN = 7168
SIZES = {"cpu": (1, 128), "cuda": (32, 2048)}
"""Backend -> experts, of 8 tokens each, and intermediate size."""

LANES = {"stage": "#0072B2", "park": "#E69F00", "load_b": "#56B4E9", "decode": "#CC79A7", "multiply": "#009E73"}
WIDTH, LEFT, LANE, TITLE, AXIS = 1100, 80, 18, 24, 26
"""Of the picture, in pixels: the whole, room for names, and heights of a lane, a title and an axis."""
LETTER = 7.0
START_GROUPS, MIDDLE_GROUPS = range(2), range(56, 58)
HALF = 0.5
"""Length of `load_b` and of a multiplication in the contract's picture, which has no times."""


@dataclass(frozen=True)
class Step:
    name: str
    start_ns: float
    end_ns: float
    group: int
    half: int = 0

    @property
    def label(self) -> str:
        return f"{self.group}" if self.name == "stage" else f"{self.group}.{self.half}"


def record(staging: str, backend: str, directory: Path) -> None:
    """Records K2 with this staging."""
    import torch

    from tracekern.moe.gemm import k2

    experts, intermediate = SIZES[backend]
    rows = torch.randn((8 * experts, HIDDEN), device=backend, dtype=torch.bfloat16)
    offsets = torch.arange(0, 8 * experts + 1, 8, device=backend, dtype=torch.int32)
    words = torch.randint(0, 1 << 48, (experts, HIDDEN // 64, 2 * intermediate, 2), device=backend)
    words.bitwise_or_(0x3C00 << 48)  # the scale 1/128
    about = {"kernel": "k2", "staging": staging, "hidden": HIDDEN, "intermediate": intermediate, "experts": experts}
    how = {"device": backend, "clock": "cycles", "blocks": slice(0, 1), "settings": about}
    with tracekern.capture(directory, **how) as capture:
        with capture.counting():  # loads the kernel's code, too
            k2(rows, offsets, words, staging=staging, detail=1 << 30, capture=capture)
            if backend == "cuda":
                torch.cuda.synchronize()
        k2(rows, offsets, words, staging=staging, detail=1 << 30, capture=capture)


def steps_of(timeline: Timeline) -> list[Step]:
    """The steps of the first sweep of warp 0 that has any, in ns from its begin."""
    spans = timeline.spans
    rows = {name: timeline.rows_of(name) for name in LANES}
    first = rows["stage"]
    tracks = [number for number, track in enumerate(timeline.tracks) if track.warp == 0 and track.block == 0]
    first = first[[spans.track[row] in tracks for row in first.tolist()]]
    sweeps = timeline.rows_of("sweep")
    sweep = next(
        row
        for row in sweeps.tolist()
        if spans.track[row] in tracks and spans.start[row] <= spans.start[first[0]] <= spans.end[row]
    )
    begin, end, track = int(spans.start[sweep]), int(spans.end[sweep]), spans.track[sweep]
    steps = []
    for name, found in rows.items():
        inside = found[(spans.track[found] == track) & (spans.start[found] >= begin) & (spans.end[found] <= end)]
        groups = timeline.field(inside, "group").tolist()
        halves = [0] * len(groups) if name == "stage" else timeline.field(inside, "half").tolist()
        for row, group, half in zip(inside.tolist(), groups, halves, strict=True):
            steps.append(Step(name, float(spans.start[row] - begin), float(spans.end[row] - begin), group, half))
    return sorted(steps, key=lambda step: step.start_ns)


def part(steps: Sequence[Step], groups: range) -> list[Step]:
    """What a warp does until these groups are multiplied, from the begin of their own steps on."""
    own = [step for step in steps if step.name in ("load_b", "decode", "multiply") and step.group in groups]
    last = max(step.end_ns for step in own)
    if groups.start == 0:
        first = 0.0
    else:
        first = max(step.end_ns for step in steps if step.name == "multiply" and step.group == groups.start - 1)
    return [step for step in steps if first <= step.start_ns and step.end_ns <= last]


def contract() -> list[Step]:
    """The contract's timeline of K2: stage(next) while half 0 is multiplied, park(next) behind each half."""
    steps = [Step("stage", 0, 1, 0), Step("park", 1, 1.5, 0, 0), Step("park", 1.5, 2, 0, 1)]
    at = 2.0
    for group in START_GROUPS:
        steps.append(Step("stage", at, at + 3 * HALF, group + 1))
        for half in range(2):
            steps.append(Step("load_b", at, at + HALF, group, half))
            steps += [Step("multiply", at + path * HALF, at + (path + 1) * HALF, group, half) for path in (1, 2)]
            steps.append(Step("park", at + 3 * HALF, at + 4 * HALF, group + 1, half))
            at += 4 * HALF
    return steps


def draw_panel(title: str, steps: Sequence[Step], top: float, unit: str) -> str:
    """A panel as SVG: a lane for each event."""
    begin, end = min(step.start_ns for step in steps), max(step.end_ns for step in steps)
    scale = (WIDTH - LEFT - 20) / (end - begin)
    parts = [f'<text x="8" y="{top + 15}" font-weight="bold">{title}</text>']
    for place, (name, color) in enumerate(LANES.items()):
        y = top + TITLE + place * LANE
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{name}</text>')
        parts.append(f'<path d="M{LEFT} {y + LANE - 1}H{WIDTH - 20}" stroke="#ddd"/>')
        for step in steps:
            if step.name != name:
                continue
            x, width = LEFT + (step.start_ns - begin) * scale, (step.end_ns - step.start_ns) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 1}" width="{max(width - 1, 0.5):.1f}" height="{LANE - 3}" fill="{color}"/>'
            )
            if width > LETTER * len(step.label):
                parts.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 13}" text-anchor="middle" fill="white">{step.label}</text>'
                )
    y = top + TITLE + len(LANES) * LANE + 14
    if unit:
        parts.append(f'<text x="{LEFT}" y="{y}" fill="#555">{begin:,.0f} {unit}</text>')
        parts.append(f'<text x="{WIDTH - 20}" y="{y}" text-anchor="end" fill="#555">{end:,.0f} {unit}</text>')
    return "\n".join(parts)


def draw(timelines: dict[str, Timeline]) -> str:
    """The picture as SVG."""
    panels = [("the contract: P = 1, group 0 is staged first (no scale)", contract(), "")]
    for staging, timeline in timelines.items():
        steps, device = steps_of(timeline), timeline.ranks[0].device
        where = "CPU backend, durations mean nothing" if timeline.ranks[0].backend == "cpu" else device
        panels.append((f"{staging}, the beginning of a sweep ({where})", part(steps, START_GROUPS), "ns"))
        middle = f"{staging}, groups {MIDDLE_GROUPS.start} and {MIDDLE_GROUPS.stop - 1}"
        panels.append((middle, part(steps, MIDDLE_GROUPS), "ns"))
    height = TITLE + len(LANES) * LANE + AXIS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {len(panels) * height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    parts += [draw_panel(title, steps, place * height, unit) for place, (title, steps, unit) in enumerate(panels)]
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", nargs=2, type=Path, metavar="CAPTURE", help="of pinned, then of direct")
    parser.add_argument("--record", choices=sorted(SIZES), help="record them first, with this backend")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.record:
        for staging, directory in zip(STAGINGS, options.captures, strict=True):
            record(staging, options.record, directory)
    timelines = {name: tracekern.load(path) for name, path in zip(STAGINGS, options.captures, strict=True)}
    options.output.write_text(draw(timelines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
