"""A program for the gate to launch: `python launched.py OUT` leaves a real capture of kernels that take known times.

The times are drawn from the name of OUT: launches differ, and the same names give the same numbers again.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path

import numpy as np
from kernels import TrackWriter

from tracekern.record.session import capture

COPY, WAIT = 0, 1
EVENTS = {
    "name": "LaunchedEvent",
    "events": [
        {"name": name, "class": kind, "ends_at": "completion", "channel": "", "begin_fields": "", "end_fields": ""}
        for name, kind in (("copy_token", "work"), ("wait_token", "wait"))
    ],
}
COPY_NS, WAIT_NS = 4000, 2000
STAGES = ("dispatch", "combine")
ITERATIONS = 3
WARPS = 2
SPANS = 50
SPREAD = 0.01


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--slow-wait", type=float, default=1.0, help="factor on the waits of dispatch")
    parser.add_argument("--room", type=int, default=2 * SPANS, help="records of a track")
    parser.add_argument("--tokens", type=int, default=64, help="goes into the shape")
    arguments = parser.parse_args()
    record(arguments.out, arguments.slow_wait, arguments.room, arguments.tokens)


def record(out: Path, slow_wait: float = 1.0, room: int = 2 * SPANS, tokens: int = 64) -> Path:
    rng = np.random.default_rng(zlib.crc32(out.name.encode()))
    of_launch = np.exp(SPREAD * rng.standard_normal(4))  # what makes a launch of the program differ from the next
    about = {"settings": {"tokens": tokens}, "command": f"launched {out}"}
    with capture(out, records_per_track=room, clocks=False, **about) as session:
        ticks = 10**15
        for _ in range(ITERATIONS):
            for stage, name in enumerate(STAGES):
                launched = session.launch(name, grid=1, warps=WARPS, events=json.dumps(EVENTS), epoch=1)
                slow = slow_wait if name == "dispatch" else 1.0
                means = np.array([COPY_NS, WAIT_NS * slow]) * of_launch[2 * stage : 2 * stage + 2]
                ends = [write_track(launched.descriptor, warp, ticks, means, rng) for warp in range(WARPS)]
                ticks = max(ends) + 500
    return out


def write_track(descriptor: int, warp: int, ticks: int, means: np.ndarray, rng: np.random.Generator) -> int:
    """SPANS pairs of a copy and a wait. Returns when the last one ended."""
    writer = TrackWriter(descriptor, 0, warp)
    writer.header["start_ticks"] = ticks
    for durations in (means * np.exp(0.03 * rng.standard_normal((SPANS, 2)))).astype(int):
        for event, duration in zip((COPY, WAIT), durations, strict=True):
            writer.begin(event, ticks=ticks)
            ticks += int(duration)
            writer.end(event, ticks=ticks)
            ticks += 10
    writer.finish()
    writer.header["end_ticks"] = ticks
    return ticks


if __name__ == "__main__":
    main()
