"""Steps of int4 experts' sweeps on record: which tiles have them, and in which order they come."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from int4_experts import draw_layer, draw_rows, draw_words, offsets_of

import tracekern
from tests.paths import ROOT
from tracekern.errors import BadInput
from tracekern.moe.gemm import fused_moe_apply, k2, k4
from tracekern.moe.gemm.kernels import FACTS, STAGINGS
from tracekern.timeline.model import Timeline

CHANNELS, OUTPUTS = 512, 256
GROUPS = CHANNELS // 64
STEPS = ("stage", "park", "load_b", "decode", "multiply")
RING_STEPS = ("wait_slot", "issue_copy", "wait_stage", "multiply_stage", "decode_sample")
KERNELS = {"k2": (k2, 2), "k4": (k4, 1)}
"""Kernel -> the step and its paths."""

Step = tuple[str, int, int, int]
"""Event, group, half and path; 0 where the event has none."""


def record(directory: Path, stage: str, staging: str, detail: int, clock: str = "realtime") -> Timeline:
    """One expert with 20 tokens: 3 token tiles by 2 output tiles."""
    kernel, paths = KERNELS[stage]
    rows, words = draw_rows(20, CHANNELS), draw_words(1, CHANNELS, paths * OUTPUTS)
    untraced = kernel(rows, offsets_of([20]), words, staging=staging)
    with tracekern.capture(directory, device="cpu", clock=clock, records_per_track=4096) as capture:
        traced = kernel(rows, offsets_of([20]), words, staging=staging, detail=detail, capture=capture)
    assert torch.equal(untraced, traced)
    timeline = tracekern.load(directory)
    assert {problem.kind for problem in timeline.problems} <= {"cycle_clock"}
    return timeline


def steps_in(timeline: Timeline) -> dict[tuple[int, int, int, int], list[Step]]:
    """(token tile, output tile, phase, warp) of each sweep -> its steps in the order of their begins."""
    spans, found = timeline.spans, {}
    steps = np.concatenate([timeline.rows_of(name) for name in STEPS])
    for sweep in timeline.rows_of("sweep").tolist():
        place = int(spans.begin_payload[sweep]) >> 13
        inside = steps[(spans.track[steps] == spans.track[sweep]) & (spans.start[steps] >= spans.start[sweep])]
        inside = inside[spans.end[inside] <= spans.end[sweep]]
        inside = inside[np.lexsort([inside, spans.start[inside]])]
        names = [timeline.events[event].name for event in spans.event[inside]]
        payloads = spans.begin_payload[inside].tolist()
        key = place & 0xFFFFF, place >> 20 & 0x3FFF, place >> 34, timeline.tracks[spans.track[sweep]].warp
        found[key] = [
            (name, payload & 0x3FF, payload >> 10 & 1, payload >> 11)
            for name, payload in zip(names, payloads, strict=True)
        ]
    return found


def multiply_half(group: int, half: int, paths: int) -> list[Step]:
    multiplied = [(name, group, half, path) for path in range(paths) for name in ("decode", "multiply")]
    return [("load_b", group, half, 0), *multiplied]


def pinned_cadence(paths: int) -> list[Step]:
    """The contract's timeline: prime, then stage(next), half 0, park(next, 0), half 1, park(next, 1)."""
    steps: list[Step] = [("stage", 0, 0, 0), ("park", 0, 0, 0), ("park", 0, 1, 0)]
    for group in range(GROUPS):
        following = group + 1 if group + 1 < GROUPS else None
        steps += [] if following is None else [("stage", following, 0, 0)]
        for half in range(2):
            steps += multiply_half(group, half, paths)
            steps += [] if following is None else [("park", following, half, 0)]
    return steps


def direct_cadence(paths: int) -> list[Step]:
    """K2 three groups ahead, K4 two: a group's place is filled again as soon as it was multiplied."""
    ahead = paths + 1
    steps: list[Step] = [("stage", group, 0, 0) for group in range(ahead)]
    for group in range(GROUPS):
        steps.append(("park", group, 0, 0))
        steps += multiply_half(group, 0, paths) + multiply_half(group, 1, paths)
        steps += [("stage", group + ahead, 0, 0)] if group + ahead < GROUPS else []
    return steps


CADENCES = {"pinned": pinned_cadence, "direct": direct_cadence}


@pytest.mark.parametrize("clock", ["realtime", "cycles"])
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("stage", KERNELS)
def test_every_nth_tile_has_its_steps_in_the_cadence_of_its_staging(tmp_path: Path, stage, staging, clock):
    found = steps_in(record(tmp_path, stage, staging, 4, clock))
    assert len(found) == 3 * 2 * 2 * 4
    wanted = CADENCES[staging](KERNELS[stage][1])
    for (token_tile, output_tile, _, _), steps in found.items():
        assert steps == (wanted if (2 * token_tile + output_tile) % 4 == 0 else [])


def test_a_ring_keeps_the_last_steps(tmp_path: Path):
    rows, words = draw_rows(8, CHANNELS), draw_words(1, CHANNELS, 128)
    with tracekern.capture(tmp_path, device="cpu", keep="last", records_per_track=64) as capture:
        k4(rows, offsets_of([8]), words, detail=1, capture=capture)
    spans = tracekern.load(tmp_path).rows_of("multiply")
    assert 0 < len(spans) < 4 * 2 * 2 * GROUPS


def test_without_detail_no_step_is_on_record(tmp_path: Path):
    layer = draw_layer(9, 2, 4, size=128)
    with tracekern.capture(tmp_path, device="cpu") as capture:
        fused_moe_apply(layer.x, layer.topk_ids, layer.topk_ws, layer.w13, layer.w2, capture=capture)
    timeline = tracekern.load(tmp_path)
    assert len(timeline.rows_of("sweep"))
    assert [name for name in STEPS if len(timeline.rows_of(name))] == []


def test_a_layer_has_steps_of_both_kernels(tmp_path: Path):
    layer = draw_layer(9, 2, 4, size=128)
    given = (layer.x, layer.topk_ids, layer.topk_ws, layer.w13, layer.w2)
    with tracekern.capture(tmp_path, device="cpu") as capture:
        out = fused_moe_apply(*given, detail=2, capture=capture)
    assert torch.equal(out, fused_moe_apply(*given, detail=2))  # unrecorded: the untraced kernels
    timeline = tracekern.load(tmp_path)
    multiplied = timeline.rows_of("multiply")
    stages = {timeline.launches[launch].name for launch in timeline.spans.launch[multiplied].tolist()}
    assert stages == {"k2", "k4"}


@pytest.mark.parametrize("detail", [-1, 1 << 31])
def test_a_detail_that_counts_no_tiles_is_refused(detail):
    rows, words = draw_rows(1, 128), draw_words(1, 128, 128)
    with pytest.raises(BadInput, match=f"detail is {detail}; wanted 0 to"):
        k4(rows, offsets_of([1]), words, detail=detail)


# ---- tracekern run moe ----

RUN = ("run", "moe", "--ranks", 2, "--tokens", 4, "--hidden", 128, "--intermediate", 128, "--experts", 4, "--topk", 2)
INT4 = ("--variant", "fused", "--expert", "int4_sparse", "--backend", "cpu", "--iterations", 1)


def test_a_run_records_steps_in_cycles(command_line, tmp_path: Path):
    done = command_line(*RUN, *INT4, "--detail", 1, "--clock", "cycles", "-o", tmp_path / "capture")
    assert done.returncode == 0, done.stderr
    timeline = tracekern.load(tmp_path / "capture")
    assert {problem.kind for problem in timeline.problems} == {"cycle_clock"}
    assert sum(len(timeline.rows_of(name)) for name in RING_STEPS) > 100
    lengths = (timeline.spans.end - timeline.spans.start)[timeline.rows_of("multiply_stage")]
    assert np.any(lengths % 32), "times between the ticks of the realtime clock"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (("--detail", 3), "--detail is 3; expert scale has no steps, int4_sparse has"),
        (("--clock", "cycles", "--keep", "last"), "--clock is cycles; a flight recorder, keep last, has the realtime"),
    ],
)
def test_a_run_refuses_what_it_cannot_record(command_line, changes, told):
    done = command_line(*RUN, *changes, "--no-trace")
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


# ---- the page ----

PAGE = (ROOT / "docs" / "int4_trace.md").read_text()


def test_the_page_names_the_events_that_there_are():
    told = re.findall(r"^\| `(\w+)` \| (?:a warp|each warp|each consumer|the producer)", PAGE, flags=re.MULTILINE)
    assert told == [event["name"] for event in json.loads(FACTS.event_table())["events"]]


def test_the_python_of_the_page_records_steps_and_its_commands_show_them(tmp_path: Path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    timeline = tracekern.load(tmp_path / "k2-capture")
    assert sum(len(timeline.rows_of(name)) for name in STEPS) == 8 * 13 * 1024 // 64
    (report,) = re.findall(r"^ {4}tracekern (report .*)$", PAGE, flags=re.MULTILINE)
    subprocess.run([sys.executable, "-m", "tracekern", *report.split()], cwd=tmp_path, check=True, timeout=120)
    assert 'id="staging"' in (tmp_path / "k2.html").read_text()
