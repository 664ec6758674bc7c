"""benchmarks/flows.py: violations by hand, and the whole of it on the CPU backend."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys

import pytest
from test_flows import End, build
from toolchains import ROOT

from tracekern.timeline.flows import join_flows
from tracekern.timeline.model import ChannelKind

sys.path.insert(0, str(ROOT / "benchmarks"))
import flows as benchmark


@pytest.mark.parametrize(
    ("wait_end", "hard_ns", "violations", "beyond"),
    [(1000, 0.0, 0, 0), (999, 0.0, 1, 1), (800, 100.0, 1, 0), (799, 100.0, 1, 1)],
)
def test_a_wait_may_not_end_before_its_signal_begins(wait_end, hard_ns, violations, beyond):
    ends = [
        End(True, 0, 1, 0, 1, start=1000, end=1010),
        End(False, 1, 0, 0, 1, start=0, end=wait_end),
        End(True, 2, 2, 1, 1, start=50, end=60),  # on one rank: no clock to blame
        End(False, 2, 2, 1, 1, start=0, end=40),
    ]
    timeline, _ = build(ends, ChannelKind.DATA, hard_ns=hard_ns)
    apart, within = benchmark.check_arrows(timeline.replace(flows=join_flows(timeline)[0]))
    assert (apart["arrows"], apart["violations"], apart["violations_beyond_hard_ns"]) == (1, violations, beyond)
    assert apart["least_ns"] == wait_end - 1000
    assert (within["arrows"], within["violations"], within["violations_beyond_hard_ns"]) == (1, 1, 1)


@pytest.mark.parametrize(("backend", "wanted"), [("cpu", "flows_cpu_2"), ("cuda", "flows_2")])
def test_a_run_on_the_cpu_leaves_the_figures_of_gpus_alone(monkeypatch, backend, wanted):
    names = []
    monkeypatch.setattr(benchmark, "write_results", lambda name, *_: names.append(name))
    timeline, _ = build([], ChannelKind.DATA)
    ranks = tuple(dataclasses.replace(rank, backend=backend) for rank in timeline.ranks)
    options = argparse.Namespace(ranks=2, iterations=1, name=None)
    assert benchmark.report(options, timeline.replace(ranks=ranks), 0) == 0
    assert names == [wanted]


def test_every_row_of_a_run_has_its_two_arrows_and_none_points_back(tmp_path):
    command = [sys.executable, "benchmarks/flows.py", "--ranks=2", "--backend=cpu", "--iterations=6", "--tokens=8"]
    done = subprocess.run(
        [*command, "--hidden=64", "--name", str(tmp_path / "flows")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "flows.json").read_text())
    assert (results["violations"], results["records_lost"], results["doubts"]) == (0, 0, [])
    assert results["rows_sent"] > 0
    for channel in benchmark.OF_TOKENS:
        arrows = [row["arrows"] for row in results["channels"] if row["channel"] == channel]
        assert sum(arrows) == results["rows_sent"]
        assert len(arrows) == 2
