"""int4 experts between dispatch and combine of eight resident ranks on one GPU, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tracekern
from tests.devices import require_gpus
from tracekern.comm.ranks.group import Group
from tracekern.moe.gemm.experts import draw_int4_experts
from tracekern.moe.p2p.pipeline import STAGES, P2PPipeline
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.run import run

RANKS = 8
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("connections", ["1", "8"])
def test_streams_of_overlapped_may_share_a_queue_of_the_device(tmp_path: Path, monkeypatch, connections: str):
    """Kernels are queued in an order in which each waits for such alone as stand before it."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    test_a_run_is_the_reference(tmp_path, "overlapped")


def test_a_graph_holds_both_streams_of_overlapped():
    require_gpus(1)
    shape = MoeShape(1, 64, 8, 2, 128, "bf16")
    experts = draw_int4_experts(shape, 128).to("cuda")
    reduce = P2PPipeline(Group(0, 1), shape, "reduce", backend="cuda")
    overlapped = P2PPipeline(Group(0, 1), shape, "overlapped", backend="cuda", partitions=3)
    batch = draw_batch(shape, seed=1, rank=0, iteration=0, routing="uniform", uneven=False).to("cuda")
    call = batch.x, batch.topk_idx, batch.topk_weights, experts
    wanted = reduce(*call)
    overlapped(*call)  # loads its kernels
    graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(wanted)
    with torch.cuda.graph(graph):
        overlapped(*call, out=out)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("variant", [*(variant for variant in STAGES if variant != "pipelined"), "two_hop"])
def test_a_run_is_the_reference(tmp_path: Path, variant: str):
    require_gpus(1)
    options = MoeRun(
        ranks=RANKS,
        variant=variant,
        backend="cuda",
        tokens=33,
        hidden=1024,
        experts=64,
        topk=4,
        expert="int4_sparse",
        intermediate=256,
        iterations=4,
        uneven=True,
        family_options={"partitions": 3} if variant == "overlapped" else {},
    )
    report = run(options, tmp_path)
    assert report.ok, report.errors
    timeline = tracekern.load(tmp_path)
    assert {"preload", "sweep", "epilogue"} <= {event.name for event in timeline.events}
    layout = "layout" if variant == "two_hop" else "tiles"
    assert {layout, "k2", "k4"} <= {launch.name for launch in timeline.launches}
