"""Two-hop dispatch of eight resident ranks on one GPU, 16 blocks each, through the Python API.

pytest -m gpu tests/moe/test_two_hop_gpu.py
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from toolchains import sanitizer

import tracekern
from tests.devices import require_gpus
from tests.paths import ROOT
from tracekern.launcher.launch import launch_ranks
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.run import run

PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
RANKS = 8
pytestmark = pytest.mark.gpu


def launch(function: str, ranks: int, **env: str) -> None:
    require_gpus(1)
    lines: list[str] = []
    exits = launch_ranks(
        ranks,
        f"tests.two_hop_gpu:{function}",
        env={**PATHS, **env},
        on_line=lambda rank, line: lines.append(line),
        timeout_s=240,
        resident=ranks > 1,
    )
    assert [ended.returncode for ended in exits] == [0] * ranks, "\n".join(lines[-40:])
    assert sum("calls, 0 wrong" in line for line in lines) == ranks, "\n".join(lines)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [2, 4])
def test_a_thousand_calls_are_right(nodes):
    launch("many_calls", RANKS, TWO_HOP=f"{nodes} 1000 cuda")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [2, 4])
def test_memcheck_finds_nothing_in_20_calls(nodes):
    require_gpus(1)
    command = [*sanitizer("memcheck"), sys.executable, "tests/two_hop_gpu.py", str(RANKS)]
    environment = {**os.environ, **PATHS, "TWO_HOP": f"{nodes} 20 cuda"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.count("20 calls, 0 wrong") == RANKS


def test_calls_that_cannot_be_right_raise_the_same_on_all_ranks():
    launch("refusals", 4)


def test_a_graph_replays_calls_with_worst_case_memory():
    launch("graph", 1)


def test_a_grid_that_has_no_room_is_refused():
    launch("too_many_blocks", RANKS)


@pytest.mark.parametrize(("nodes", "host_driven"), [(2, True), (4, False)])
def test_a_run_is_the_reference_and_its_late_rank_is_seen(tmp_path, nodes, host_driven):
    """Calls that are queued wait for no counts."""
    require_gpus(1)
    options = MoeRun(
        ranks=RANKS,
        variant="two_hop",
        backend="cuda",
        tokens=128,
        hidden=1024,
        experts=64,
        iterations=6,
        late_rank=3,
        host_driven=host_driven,
        family_options={"nodes": nodes, "channels": 8},
    )
    report = run(options, tmp_path)
    assert report.ok, report.errors
    assert report.placement == f"{RANKS} ranks resident on one GPU"
    timeline = tracekern.load(tmp_path)
    assert {"forward_token", "receive_token", "wait_ring_space"} <= {event.name for event in timeline.events}
    assert "allocate_recv" in timeline.host_names
    assert ("poll_counts" in timeline.host_names) == host_driven
