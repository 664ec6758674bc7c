"""The captures under traces/ stay readable, and the trace beside each is the one that its capture gives."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest
from trace_processor import TraceProcessor, assert_no_loss

import tracekern
from tests.paths import TRACES

_OF_TOKENS = ("copy_token", "reduce_token", "signal_token", "wait_token", "wait_result")
_OF_VARIANT = {
    "low_latency": ("copy_token", "reduce_token", "signal_count", "wait_count", "wait_results"),
    "two_hop": ("signal_peer_tail", "wait_peer_tail", "receive_token", "return_peer_credit", "send_row", "sum_in_node"),
    "two_hop, one node": ("send_token",),
    "two_hop, several nodes": ("copy_to_ring", "signal_tail", "wait_tail", "forward_token", "return_credit"),
    "reduce": ("copy_row", "expand_row", "send_partial", "multiply_tile", "wait_stage", "multiply_stage", "issue_copy"),
    "overlapped": ("copy_row", "expand_row", "wait_row", "multiply_tile", "send_partial", "reduce_token"),
    "pipelined": ("copy_row", "reduce_token", "signal_row", "wait_row", "wait_partial"),
}
_OF_TRANSFERS = ("write_imm", "wait_imm", "transfer")
_OF_INT4_STEPS = ("stage", "park", "load_b", "decode", "multiply")
CAPTURES = sorted(path.parent for path in TRACES.glob("*/capture.json"))


@pytest.mark.parametrize("directory", CAPTURES, ids=lambda path: path.name)
def test_a_kept_capture_gives_its_kept_trace(directory):
    timeline = tracekern.load(directory)
    assert not [problem for problem in timeline.problems if problem.severity == "error"]
    names = [event.name for event in timeline.events]
    counts = Counter(names[event] for event in timeline.spans.event.tolist())
    processor = TraceProcessor(directory / "trace.pftrace.gz")
    assert_no_loss(processor)
    settings = timeline.ranks[0].metadata["settings"]
    of_calls = _OF_VARIANT.get(settings.get("variant"), _OF_TOKENS)
    if settings.get("transport") == "fabric":
        of_calls += ("put_message", "command", "put_row", "wait_sent")
    elif nodes := settings.get("nodes"):
        of_calls += _OF_VARIANT["two_hop, several nodes" if nodes > 1 else "two_hop, one node"]
    if "provider" in settings:
        of_calls = _OF_TRANSFERS
    for name in _OF_INT4_STEPS if "staging" in settings else of_calls:
        ((loaded,),) = processor.query(f"select count(*) from slice where name = '{name}'")
        assert loaded == counts[name] > 0, name


@pytest.mark.parametrize("directory", CAPTURES, ids=lambda path: path.name)
def test_a_kept_capture_says_how_it_was_made(directory):
    manifest = json.loads((directory / "capture.json").read_text())
    makers = (
        "tracekern run ",
        "benchmarks/int4_timeline.py ",
        "benchmarks/weights.py ",
        "examples/kv_cache/main.py ",
        "examples/expert_groups/main.py ",
    )
    assert manifest["command"].startswith(makers)
    assert manifest["created"]
    assert manifest["command"].split(" -o ")[0] in (directory / "README.md").read_text()


def test_the_walk_tells_what_the_same_capture_shows_without_alignment():
    directory = TRACES / "h200x4_late_host"
    aligned, unaligned = (tracekern.load(directory, unaligned=choice) for choice in (False, True))
    took, apart = (
        line.spans.end[line.flows.wait] - line.spans.start[line.flows.signal] for line in (aligned, unaligned)
    )
    assert int((took < 0).sum()) == 0
    backwards = int((apart < 0).sum())
    clocks = [rank.clock for rank in aligned.ranks]
    first, last = (np.array([clock.anchor_ns[at] - clock.anchor_ticks[at] for clock in clocks]) for at in (0, -1))
    seconds = max(clock.anchor_ns[-1] - clock.anchor_ns[0] for clock in clocks) / 1e9
    figures = {f"{len(took):,}", f"{backwards:,}", f"{-apart.min() / 1e3:.0f}", f"{round(np.ptp(last) / 1e3, -1):.0f}"}
    figures.add(f"{np.ptp(last - first) / 1e3 / seconds:.0f}")
    walk = (TRACES.parent / "docs" / "walkthrough.md").read_text()
    assert figures <= set(re.findall(r"\d+(?:,\d{3})*", walk))
    for name, arrows in (("trace", len(took)), ("unaligned", len(took) - backwards)):
        assert TraceProcessor(directory / f"{name}.pftrace.gz").query("select count(*) from flow") == [(arrows,)]


def test_each_wait_of_the_way_back_has_its_arrow():
    timeline = tracekern.load(TRACES / "cpu_two_hop")
    for name in ("wait_return_tail", "wait_return_ring", "wait_summed", "wait_tail"):
        rows = timeline.rows_of(name)
        assert len(rows)
        assert np.isin(rows, timeline.flows.wait).all(), name
