"""Names the right cause over many seeds: quick cases of what benchmarks/causes.py runs at length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from simulator import Case, Noise, Shape, SlowWork, simulate

import tracekern
from tracekern.analysis.findings import analyze
from tracekern.analysis.why.answer import Answer

SEEDS = range(40)
NOISE = 0.04


def with_a_cause(seed: int) -> Case:
    """A slow rank, a set of them, and one that is slow from an iteration on or in every third."""
    ranks = [seed % 6], [1, 3, seed % 2 + 4], [2], [seed % 5]
    iterations = (), (), tuple(range(6 + seed % 12, 24)), tuple(range(seed % 3, 24, 3))
    kind = seed % 4
    slow = tuple(SlowWork(rank=rank, share=0.3 + 0.02 * seed, iterations=iterations[kind]) for rank in ranks[kind])
    noise = list(Noise)[seed % 3]
    return Case((Shape.RING, Shape.BARRIER)[seed % 2], 7, 24 if iterations[kind] else 10, slow, NOISE, noise)


def without_a_cause(seed: int) -> Case:
    """Noise alone, launches that are late by chance, and outliers, of all shapes."""
    vary = {}, {"has_host_jitter": True}, {"outliers": 0.005}
    shape, noise = list(Shape)[seed % len(Shape)], list(Noise)[seed % 3]
    num_warps = 16 if shape is Shape.PIPELINE else 0
    return Case(shape, 4, 10, noise=NOISE, noise_kind=noise, num_warps=num_warps, **vary[seed // 3 % 3])


def answer_of(case: Case, seed: int, directory: Path) -> tuple[Answer, float]:
    truth = simulate(case, seed, directory / str(seed))
    return analyze(tracekern.load(truth.directory)).answer, truth.cost_ns


def test_what_is_injected_is_named_and_costs_what_the_run_is_longer_with_it(tmp_path: Path):
    missed, ratios = [], []
    for seed in SEEDS:
        case = with_a_cause(seed)
        answer, cost_ns = answer_of(case, seed, tmp_path)
        named = {rank for cause in answer.causes for rank in cause.candidate.ranks}
        if named == {entry.rank for entry in case.injections}:
            ratios.append(answer.causes[-1].together_ns / cost_ns)
        else:
            missed.append((seed, named, answer.silence))
    assert len(missed) <= 1, missed
    assert (np.abs(np.array(ratios) - 1) < 0.05).mean() >= 0.95, ratios


def test_nobody_is_named_where_all_ranks_are_alike(tmp_path: Path):
    named = {seed: answer_of(without_a_cause(seed), seed, tmp_path)[0].causes for seed in SEEDS}
    assert sum(map(bool, named.values())) <= 1, named
