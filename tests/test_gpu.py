"""The same kernels, results and captures on real GPUs; skipped where there are none."""

from __future__ import annotations

import pytest
import torch

import tracekern
from tracekern.moe.pipeline import STAGES
from tracekern.moe.run import MoeRun, run

SHAPE = {"tokens": 64, "hidden": 2880, "topk": 6, "iterations": 4, "backend": "cuda"}


def require_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, {torch.cuda.device_count()} are here")


def options(ranks: int, **changes: object) -> MoeRun:
    return MoeRun(**{**SHAPE, "ranks": ranks, "experts": 8 * ranks, **changes})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("variant", list(STAGES))
def test_one_gpu_gives_the_bits_of_reference(tmp_path, variant, dtype):
    require_gpus(1)
    run(options(1, variant=variant, dtype=dtype), tmp_path).raise_for_error()


@pytest.mark.multigpu
@pytest.mark.parametrize("routing", ["uniform", "zipf", "one-hot-rank"])
@pytest.mark.parametrize("variant", list(STAGES))
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gpus_give_the_bits_of_reference(tmp_path, ranks, variant, routing):
    require_gpus(ranks)
    run(options(ranks, variant=variant, routing=routing, hidden=97), tmp_path).raise_for_error()


@pytest.mark.multigpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_capture_of_gpus_merges_without_a_doubt(tmp_path, ranks):
    require_gpus(ranks)
    run(options(ranks, iterations=20), tmp_path).raise_for_error()
    timeline = tracekern.load(tmp_path)
    # The kernels are as short as the test wants them: probes may be a few percent of them.
    assert not [problem for problem in timeline.problems if problem.kind != "dense_probes"]
    assert len(timeline.flows) > 1000
    assert all(rank.backend == "cuda" and rank.resolution_ticks == 32 for rank in timeline.ranks)
    assert all(rank.clock.hard_ns < 5000 for rank in timeline.ranks)
