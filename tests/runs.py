"""Runs with numbers drawn by hand, for the tests of the gate."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tracekern.gate.run import Run

METRICS = {
    "dispatch.copy_token.p50": 4000.0,
    "dispatch.wait_token.p50": 2000.0,
    "dispatch.wait_token.p99": 9000.0,
    "dispatch.wait_token.wait_share": 0.3,
    "dispatch.wait_token.wait_per_iteration": 1_500_000.0,
    "combine.reduce_token.p50": 6000.0,
    "end_to_end.p50": 90_000.0,
}


def make_run(number: int = 0, metrics: Mapping[str, float] | None = None, **changes: object) -> Run:
    metrics = METRICS if metrics is None else metrics
    values = {
        "source": f"run {number}",
        "run_id": f"run-{number}",
        "created": "2026-01-01T00:00:00+00:00",
        "command": "launched",
        "device": "NVIDIA H200",
        "backend": "cuda",
        "nodes": ("node-a",),
        "shape": {"ranks": 4, "settings": {"tokens": 64}},
        "metrics": dict(metrics),
        "spans": {name.rpartition(".")[0]: 500 for name in metrics},
        "resolution_ns": 32.0,
        "probe_cost_ns": 56.0,
        "clock_hard_ns": 900.0,
        "aligned": True,
        **changes,
    }
    return Run(**values)


def draw_runs(
    count: int,
    seed: int,
    *,
    factor: Mapping[str, float] | None = None,
    spread: float = 0.01,
    metrics: Mapping[str, float] | None = None,
    first: int = 0,
) -> list[Run]:
    """`count` runs around `metrics`, those in `factor` multiplied; run ids count from `first`."""
    rng = np.random.default_rng(seed)
    runs = []
    for number in range(first, first + count):
        values = {
            name: value * (factor or {}).get(name, 1.0) * float(np.exp(spread * rng.standard_normal()))
            for name, value in (METRICS if metrics is None else metrics).items()
        }
        runs.append(make_run(number, values, run_id=f"run-{seed}-{number}"))
    return runs
