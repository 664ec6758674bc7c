"""A slow link between nodes on the CPU backend: rows for other nodes take their time, those within a node do not."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from attack import TSAN, assert_right, run_program
from toolchains import ROOT, program

import tracekern
from tracekern.errors import BadInput
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.placement import place
from tracekern.moe.workload.run import run

sys.path.insert(0, str(ROOT / "benchmarks"))
from slow_link import stores_between_nodes

GB_PER_S = 0.004
PEERS = 2
SMALL = {"ranks": 4, "tokens": 8, "hidden": 1024, "experts": 8, "topk": 3, "uneven": False, "routing": "uniform"}


@pytest.mark.programs("tests/cpp/slow_link.cpp")
@pytest.mark.parametrize(("executor", "flags"), [("fibers", ()), ("threads", TSAN)])
def test_what_goes_to_another_node_waits_for_the_link_and_nothing_else_does(executor, flags):
    assert_right(run_program(program("slow_link", *flags), executor))


@pytest.mark.parametrize(
    "variant",
    [
        "two_hop",
        "reduce",
        "low_latency",
        *(pytest.param(name, marks=pytest.mark.rotates) for name in ("dedup", "token", "pipelined")),
    ],
)
def test_kernels_take_at_least_the_time_of_their_bytes_on_the_link(tmp_path, variant):
    report = run(MoeRun(**SMALL, variant=variant, iterations=2, slow_link=GB_PER_S), tmp_path)
    report.raise_for_error()
    timeline = tracekern.load(tmp_path)
    spans, (stores, num_bytes) = timeline.spans, stores_between_nodes(timeline, PEERS)
    launches = np.unique(spans.launch[stores])
    assert len(launches) >= SMALL["ranks"] * 2
    for launch in launches:
        own = spans.launch[stores] == launch
        began_ns, ended_ns = spans.start[spans.launch == launch].min(), spans.end[spans.launch == launch].max()
        # The words behind a row's values, 48 of 2,096 bytes at most, are free; and ranks' clocks differ in rate.
        assert ended_ns - began_ns >= 0.97 * num_bytes[own].sum() / GB_PER_S


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slow_link": 0.0}, "slow-link is 0; wanted 0.001 to 1000 GB/s"),
        ({"slow_link": -1.0}, "slow-link is -1; wanted"),
        ({"slow_link": float("nan")}, "slow-link is nan; wanted"),
        ({"slow_link": 1.0, "backend": "cuda"}, "slow-link is 1 and backend cuda; only the CPU backend"),
        ({"slow_link": 1.0, "link_nodes": 3}, "nodes is 3; for a slow link wanted 2 or more that divide 4 ranks"),
        ({"slow_link": 1.0, "variant": "two_hop", "family_options": {"nodes": 1}}, "nodes is 1; for a slow link"),
        ({"slow_link": 1.0, "variant": "sorted"}, "variant sorted has no kernels that use it"),
    ],
)
def test_what_no_link_can_be_is_refused(options, said):
    with pytest.raises(BadInput, match=said):
        MoeRun(**{**SMALL, **options})


def test_a_run_with_a_slow_link_is_on_the_cpu_and_its_work_says_so():
    options = MoeRun(**SMALL, variant="reduce", slow_link=0.5)
    assert options.is_for_cpu
    assert not place(options).is_resident
    assert {"slow_link": 0.5, "nodes": 2}.items() <= options.workload.items()
    assert "nodes" not in MoeRun(**SMALL, variant="two_hop", slow_link=0.5).workload, "the kernels' table says how many"


def test_nodes_are_those_of_the_link_where_the_variant_has_none(command_line):
    arguments = ("--ranks", 4, "--tokens", 4, "--hidden", 64, "--experts", 8, "--topk", 2, "--iterations", 1)
    done = command_line("run", "moe", *arguments, "--variant", "dedup", "--nodes", 4, "--slow-link", 1, "--no-trace")
    assert done.returncode == 0, done.stderr
    assert "on 4 nodes, 1 GB/s from each rank to other nodes" in " ".join(done.stdout.split())
