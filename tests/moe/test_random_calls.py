"""Shapes, grids and captures that nobody thought of: results are the reference's bits, call after call."""

from __future__ import annotations

from functools import partial

import pytest
import random_ranks
import torch

from tests.devices import require_gpus

assert_right = partial(random_ranks.assert_right, "random_calls")


@pytest.mark.parametrize("how", [(), ("--resident",)], ids=["processes", "resident"])
def test_random_calls_on_cpu(how):
    assert_right("cpu", 3, 8, *how)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_many_random_calls_on_cpu(ranks):
    assert_right("cpu", ranks, 150, "--seed", 1 + ranks)


@pytest.mark.gpu
def test_random_calls_give_the_bits_of_reference_on_gpus():
    """On one GPU its two ranks take turns, in a few cases with graphs; on several each rank has its own."""
    require_gpus(1)
    num_gpus = torch.cuda.device_count()
    assert_right("cuda", max(2, num_gpus), 16 if num_gpus == 1 else 40)


@pytest.mark.gpu
def test_random_calls_of_resident_ranks_give_the_bits_of_reference():
    require_gpus(1)
    assert_right("cuda", 8, 25, "--resident")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_random_calls_of_resident_ranks():
    require_gpus(1)
    assert_right("cuda", 8, 200, "--resident", "--seed", 2)
