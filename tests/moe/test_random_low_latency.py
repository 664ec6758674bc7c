"""Low latency calls of shapes, grids and orders that nobody thought of: every row and every result is right."""

from __future__ import annotations

from functools import partial

import pytest
import random_ranks

from tests.devices import require_gpus

assert_right = partial(random_ranks.assert_right, "random_low_latency")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_random_calls_on_cpu(ranks):
    assert_right("cpu", ranks, 3)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 4, 5, 6, 7, 8])
def test_many_random_calls_on_cpu(ranks):
    assert_right("cpu", ranks, 200, "--seed", 1 + ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_random_calls_of_resident_ranks(ranks):
    require_gpus(1)
    assert_right("cuda", ranks, 10, "--resident")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_many_random_calls_of_resident_ranks(ranks):
    require_gpus(1)
    assert_right("cuda", ranks, 40, "--resident", "--seed", 2)
