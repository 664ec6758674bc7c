"""Low latency calls of resident ranks on one GPU through the Python API, and a run of them."""

from __future__ import annotations

import os

import numpy as np
import pytest

import tracekern
from tests.devices import require_gpus
from tests.paths import ROOT
from tracekern.analysis.waits.analyze import WaitKind, analyze_waits
from tracekern.errors import NotBuilt
from tracekern.fabric.library import require_library
from tracekern.launcher.launch import launch_ranks
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.run import run

RANKS = 8
pytestmark = pytest.mark.gpu


@pytest.fixture
def network():
    try:
        require_library()
    except NotBuilt as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("function", "ranks"),
    [("bad_choices", RANKS), ("streams", RANKS), ("graph", 1), ("two_graphs", 1), ("deepep", RANKS)],
)
def test_nothing_is_wrong(function, ranks):
    require_gpus(1)
    assert_nothing_is_wrong(function, ranks)


def test_shm_is_refused_in_one_line(monkeypatch, tmp_path, network):
    require_gpus(1)
    monkeypatch.setenv("TRACEKERN_NET", "shm")
    of_run = {"variant": "low_latency", "backend": "cuda", "tokens": 8, "hidden": 256, "experts": 8}
    report = run(MoeRun(**of_run, ranks=2, iterations=1, transport="fabric", link_nodes=2), tmp_path)
    assert any("network: shm: both engines are in this process; use tcp" in error for error in report.errors)


@pytest.mark.parametrize("function", ["hosts", "lost_host"])
def test_nothing_is_wrong_between_hosts(network, function):
    require_gpus(1)
    assert_nothing_is_wrong(function, RANKS)


def assert_nothing_is_wrong(function: str, ranks: int) -> None:
    lines: list[str] = []
    exits = launch_ranks(
        ranks,
        f"tests.low_latency_gpu:{function}",
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        on_line=lambda rank, line: lines.append(line),
        timeout_s=120,
        resident=ranks > 1,
    )
    assert [ended.returncode for ended in exits] == [0] * ranks, "\n".join(lines[-40:])
    assert sum(": 0 wrong" in line for line in lines) == ranks, "\n".join(lines)


@pytest.mark.parametrize("dispatch_dtype", [1, 2], ids=["fp8", "bf16"])
def test_a_run_is_the_reference_and_its_late_rank_is_seen(tmp_path, dispatch_dtype):
    require_gpus(1)
    options = MoeRun(
        ranks=RANKS,
        variant="low_latency",
        backend="cuda",
        tokens=32,
        hidden=1024,
        experts=64,
        iterations=6,
        late_rank=3,
        family_options={"dispatch_dtype": dispatch_dtype},
    )
    report = run(options, tmp_path)
    assert report.ok, report.errors
    assert report.placement == f"{RANKS} ranks resident on one GPU"
    timeline = tracekern.load(tmp_path)
    assert {"copy_token", "wait_count", "reduce_token"} <= {event.name for event in timeline.events}
    assert len(timeline.flows) > 6 * RANKS * 64  # counts and results, each of all pairs


def test_a_run_on_two_hosts_is_the_reference_and_each_wait_has_its_signal(tmp_path, network):
    require_gpus(1)
    of_run = {"variant": "low_latency", "backend": "cuda", "tokens": 32, "hidden": 1024, "experts": 64}
    report = run(MoeRun(**of_run, ranks=RANKS, iterations=6, transport="fabric", link_nodes=2), tmp_path)
    assert report.ok, report.errors
    timeline = tracekern.load(tmp_path)
    assert len({rank.node for rank in timeline.ranks}) == 2
    assert not np.any(analyze_waits(timeline).kind == WaitKind.UNMATCHED)
