"""The captures under traces/ stay readable, and the trace beside each is the one that its capture gives."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from trace_processor import TraceProcessor, assert_no_loss

import tracekern

TRACES = Path(__file__).resolve().parent.parent / "traces"
CAPTURES = sorted(path.parent for path in TRACES.glob("*/capture.json"))


@pytest.mark.parametrize("directory", CAPTURES, ids=lambda path: path.name)
def test_a_kept_capture_gives_its_kept_trace(directory):
    timeline = tracekern.load(directory)
    assert not [problem for problem in timeline.problems if problem.severity == "error"]
    names = [event.name for event in timeline.events]
    counts = Counter(names[event] for event in timeline.spans.event.tolist())
    processor = TraceProcessor(directory / "trace.pftrace.gz")
    assert_no_loss(processor)
    for name in ("copy_token", "signal_token", "wait_token", "wait_result", "reduce_token"):
        ((loaded,),) = processor.query(f"select count(*) from slice where name = '{name}'")
        assert loaded == counts[name] > 0, name


@pytest.mark.parametrize("directory", CAPTURES, ids=lambda path: path.name)
def test_a_kept_capture_says_how_it_was_made(directory):
    manifest = json.loads((directory / "capture.json").read_text())
    assert manifest["command"].startswith("tracekern run moe ")
    assert manifest["created"]
    assert manifest["command"].split(" -o ")[0] in (directory / "README.md").read_text()
