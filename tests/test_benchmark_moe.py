"""benchmarks/moe.py: its byte counts against loops, and the whole of it on the CPU backend."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys

import numpy as np
import pytest
from toolchains import ROOT

from tracekern.moe.p2p.pipeline import STAGES
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape

sys.path.insert(0, str(ROOT / "benchmarks"))
import moe
from harness import read_results


def bytes_in_loops(topk_idx: list[np.ndarray], num_ranks: int, num_experts: int, deduplicated: bool) -> int:
    """Rows that the busiest rank sends or receives."""
    sent, received = [0] * num_ranks, [0] * num_ranks
    for source, tokens in enumerate(topk_idx):
        for chosen in tokens.tolist():
            peers = [expert // (num_experts // num_ranks) for expert in chosen if expert >= 0]
            for peer in set(peers) if deduplicated else peers:
                if peer != source:
                    sent[source] += 1
                    received[peer] += 1
    return max(sent + received)


@pytest.mark.parametrize("seed", range(5))
def test_traffic_counts_what_loops_count(seed):
    rng = np.random.default_rng(seed)
    chosen = [rng.integers(-1, 12, (int(rng.integers(0, 30)), 4)) for _ in range(3)]
    found = moe.traffic(chosen, 3, 12, 100)
    assert found["once_bytes"] == 100 * bytes_in_loops(chosen, 3, 12, True)
    assert found["each_bytes"] == 100 * bytes_in_loops(chosen, 3, 12, False)
    assert found["limit_us"] == 2 * found["once_bytes"] / moe.LINK_BYTES_PER_NS / 1e3
    assert found["overlapped_limit_us"] <= found["limit_us"]


@pytest.mark.parametrize("name", ["moe_2", "moe_4"])
def test_kept_rates_are_those_of_the_rows_that_the_seed_draws(name):
    kept = read_results(name)
    options = argparse.Namespace(**kept["options"])
    drawn = moe.loads(options)
    for load in kept["loads"]:
        assert load["tokens"] == drawn[load["load"]]
        chosen = []
        for rank, tokens in enumerate(load["tokens"]):
            narrow = MoeShape(options.ranks, tokens, options.experts, options.topk, 1, options.dtype)
            batch = draw_batch(narrow, seed=moe.SEED, rank=rank, iteration=0, routing="uniform", uneven=False)
            chosen.append(batch.topk_idx.numpy())
        traffic = moe.traffic(chosen, options.ranks, options.experts, options.hidden * 2)
        assert {key: load[key] for key in traffic} == traffic
        for row in load["rows"].values():
            told = {leg: dict(figures) for leg, figures in row.items()}
            moe.add_rates(row, traffic)
            assert row == told


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_every_variant_is_measured_on_the_cpu(tmp_path, ranks):
    small = shlex.split("--tokens 6 --many 9 --hidden 64 --experts 8 --topk 2 --samples 2 --blocks 2 --warps 2")
    command = [sys.executable, "benchmarks/moe.py", f"--ranks={ranks}", "--backend=cpu", *small]
    done = subprocess.run(
        [*command, "--name", str(tmp_path / "moe")], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "CPU backend: order and coverage, never GPU durations" in done.stdout
    results = json.loads((tmp_path / "moe.json").read_text())
    assert [load["load"] for load in results["loads"]] == ["1..6 drawn", "9 each"]
    for load in results["loads"]:
        assert set(load["rows"]) == {*STAGES, "sorted (gloo)"}
        assert all(row["call"]["median_us"] > 0 for row in load["rows"].values())
        assert load["limit_us"] == 0 if ranks == 1 else load["limit_us"] > 0
        for row in load["rows"].values():
            call = row["call"]
            assert call["gb_per_s"] == pytest.approx(2 * load["once_bytes"] / call["median_us"] / 1e3)
            assert call["share_of_limit"] == pytest.approx(load["limit_us"] / call["median_us"])
    assert set(results["entry_skew_ns"]) == {load["load"] for load in results["loads"]}
    assert all(skew["calls"] > 0 for skew in results["entry_skew_ns"].values())
