"""Captures whose contents are damaged and whose checksums are right: each is read, or refused in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.captures import CaptureSpec, write_capture
from tests.conftest import CommandLine
from tests.damage import IN_DEPTH, SECTIONS, Parts, build
from tests.paths import ROOT
from tracekern.analysis.findings import analyze
from tracekern.cli.commands.info import info
from tracekern.dump import format as fmt
from tracekern.errors import BadInput
from tracekern.formatting import count
from tracekern.gate.run import read_run
from tracekern.timeline.join.damage import damage_of, damaged_times
from tracekern.timeline.load import load
from tracekern.timeline.select import select
from tracekern.viewers.report.headlines import headlines
from tracekern.viewers.report.report_page import report_page

ENTRY_POINTS = {"torch profile", "manifest", "all times of all ranks", *SECTIONS}
SPEC = CaptureSpec(groups=2, launches=2, host_spans=2)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("seed", "count"), [(1, 40), *(pytest.param(seed, 3000, marks=pytest.mark.soak) for seed in (2, 3))]
)
def test_damage_never_ends_in_a_traceback(seed: int, count: int):
    """Nor in a numeric warning, a time that wrapped around, 20 s for one capture, or 1 GiB."""
    script = [sys.executable, str(ROOT / "tests" / "damaged_cases.py"), "--seed", str(seed), "--count", str(count)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, f"repeat with python tests/damaged_cases.py and these:\n{done.stdout}{done.stderr}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(found["all"].values()) == count
    assert found["all"]["read"] > count / 4
    assert found["all"]["refused"] > count / 4
    assert found["peak_mib"] < 1024
    drawn = {name.rpartition(":")[0] for name in found["one section"]}
    assert drawn <= ENTRY_POINTS if count < 100 else drawn == ENTRY_POINTS


def test_a_case_is_the_same_in_every_run(tmp_path: Path):
    path = write_capture(tmp_path, SPEC) / fmt.dump_file_name(1)
    for section, damage in SECTIONS.items():
        first, second = (damage(random.Random(section), Parts.of(path)) for _ in range(2))
        assert first == second, section
    assert set(IN_DEPTH) <= set(SECTIONS)


def test_parts_put_together_again_are_the_dump(tmp_path: Path):
    path = write_capture(tmp_path, SPEC) / fmt.dump_file_name(1)
    metadata, payload = Parts.of(path).layout()
    assert build(json.dumps(metadata).encode(), payload) == path.read_bytes()


def damaged(directory: Path, key: str, field: str, value: int, row: int = 0) -> Path:
    """A capture of two ranks, of which rank 1 has one other number in one table."""
    path = write_capture(directory, SPEC) / fmt.dump_file_name(1)
    parts = Parts.of(path)
    rows: np.ndarray = parts.headers[0] if key == "headers" else getattr(parts, key)
    rows[field][row] = value
    metadata, payload = parts.layout()
    path.write_bytes(build(json.dumps(metadata).encode(), payload))
    return directory


PING_PONG, BRACKET = 0, 8


@pytest.mark.parametrize(
    ("key", "row", "field", "value", "said"),
    [
        ("clock_samples", BRACKET, "t0", -1, "clock sample 8: t0 is -1, wanted 0..4611686018427387904; damaged"),
        ("host_spans", 0, "end_ns", (1 << 63) - 1, "host span 0: end_ns is 9223372036854775807, wanted 0.."),
        ("headers", 3, "end_ticks", (1 << 64) - 1, "block 1 warp 1: end_ticks is 18446744073709551615, wanted 0.."),
    ],
)
def test_a_time_that_cannot_be_is_named(tmp_path: Path, key: str, row: int, field: str, value: int, said: str):
    damaged(tmp_path, key, field, value, row)
    for unaligned in (False, True):
        with pytest.raises(BadInput) as refused:
            load(tmp_path, unaligned=unaligned)
        assert f"{fmt.dump_file_name(1)}: " in str(refused.value)
        assert said in str(refused.value)


def test_no_figure_is_built_on_times_that_cannot_be(
    tmp_path: Path, command_line: CommandLine, capsys: pytest.CaptureFixture[str]
):
    """They gave "waiting 1569966309445 % of the warps' time", after 28 s."""
    for name in ("sound", "damaged"):
        write_capture(tmp_path / name, SPEC)
    damaged(tmp_path / "damaged", "headers", "start_ticks", 1 << 50, 3)
    text = (
        "the times are damaged: events of rank 1 lie 125,900 s apart, the capture lasted 1.00 s; "
        "record again, or leave rank 1 out"
    )
    timeline = load(tmp_path / "damaged")
    assert [(p.severity, p.text) for p in timeline.problems if p.kind == "damaged_times"] == [("error", text)]
    assert [(line.word, line.text) for line in headlines(analyze(timeline))] == [
        ("verdict", f"No figure is given: {text}")
    ]
    page = report_page(analyze(timeline), "damaged", "damaged", "open damaged").replace("\u00a0", " ")
    assert page.count(f"{text[0].upper()}{text[1:]}.") == 1
    assert "How far can this be trusted?" in page
    assert "Who waits for whom?" not in page
    info([tmp_path / "damaged"])
    told = capsys.readouterr().out
    assert f"error damaged_times: {text}\n" in told
    assert told.splitlines()[1] == f"2 ranks, {len(timeline.spans)} spans, {count(len(timeline.flows), 'arrow')}"
    assert "longest was" not in told
    assert read_run(tmp_path / "damaged").losses[0] == text
    with pytest.raises(BadInput, match="the times are damaged"):
        load(tmp_path / "damaged", strict=True)
    refused = command_line("diff", tmp_path / "sound", tmp_path / "damaged")
    assert (refused.returncode, refused.stderr) == (2, f"tracekern: {tmp_path / 'damaged'}: {text}\n")
    assert [damage_of(select(timeline, ranks=[rank])) for rank in range(2)] == ["", text]


@pytest.mark.parametrize("key", ["headers", "host_spans"])
def test_times_that_cannot_be_are_found_in_every_lane(tmp_path: Path, key: str):
    field, value = ("end_ticks", 1 << 60) if key == "headers" else ("end_ns", 1 << 60)
    damaged(tmp_path, key, field, value)
    assert damage_of(load(tmp_path)).startswith("the times are damaged: events of rank 1 lie ")


def test_a_clock_that_is_known_to_less_than_all_events_take_proves_nothing(tmp_path: Path):
    timeline = load(write_capture(tmp_path, SPEC))
    for hard_ns, is_damaged in ((0.99e8, False), (1.01e8, True)):
        one, other = timeline.ranks
        vague = dataclasses.replace(other, clock=dataclasses.replace(other.clock, hard_ns=hard_ns))
        found = damaged_times(timeline.replace(ranks=(one, vague)))
        assert [problem.text.partition(": ")[2] for problem in found] == [
            "the clock of rank 1 is known to ±101 ms, and all events lie within 8.00 us; "
            "record again, or leave rank 1 out"
        ] * is_damaged
        assert damaged_times(timeline.replace(ranks=(one, vague), aligned=False)) == ()


def test_ranks_that_are_farther_apart_than_the_capture_lasted(tmp_path: Path):
    path = write_capture(tmp_path, SPEC) / fmt.dump_file_name(1)
    parts, step = Parts.of(path), 1 << 45
    for name in ("t1", "t2"):  # of the ping-pongs with rank 0, and its own reading beside the host's
        parts.clock_samples[name] -= step
    metadata, payload = parts.layout()
    path.write_bytes(build(json.dumps(metadata).encode(), payload))
    timeline = load(tmp_path)
    assert damage_of(select(timeline, ranks=[0])) == ""
    text = damage_of(timeline)
    assert text.startswith("the times are damaged: events lie 35,184 s apart, the capture lasted 1.00 s; ")
    assert text.endswith("leave ranks 0 and 1 out")


@pytest.mark.parametrize("path", sorted((ROOT / "traces").glob("*/capture.json")), ids=lambda path: path.parent.name)
def test_the_times_of_kept_captures_can_be(path: Path):
    assert damage_of(load(path.parent)) == ""
