"""Low latency calls of shapes, grids and orders that nobody thought of: every row and every result is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = str(Path(__file__).with_name("random_low_latency.py"))


def assert_right(backend: str, ranks: int, count: int, *options: object) -> None:
    command = [sys.executable, PROGRAM, backend, str(ranks), str(count), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = f"{count} of {count} cases are right on {ranks} ranks; "
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith(said), done.stdout[-4000:]


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_random_calls_on_cpu(ranks):
    assert_right("cpu", ranks, 10)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 4, 5, 6, 7, 8])
def test_many_random_calls_on_cpu(ranks):
    assert_right("cpu", ranks, 200, "--seed", 1 + ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_random_calls_of_resident_ranks(ranks):
    if not torch.cuda.is_available():
        pytest.skip("needs 1 GPU, 0 are here")
    assert_right("cuda", ranks, 10, "--resident")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_many_random_calls_of_resident_ranks(ranks):
    if not torch.cuda.is_available():
        pytest.skip("needs 1 GPU, 0 are here")
    assert_right("cuda", ranks, 40, "--resident", "--seed", 2)
