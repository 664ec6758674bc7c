"""Shapes, grids and captures that nobody thought of: results are the reference's bits, call after call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = str(Path(__file__).with_name("random_calls.py"))


def assert_right(backend: str, ranks: int, count: int, *options: object) -> None:
    command = [sys.executable, PROGRAM, backend, str(ranks), str(count), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True)
    said = [f"rank {rank}: {count} of {count} cases are right" for rank in range(ranks)]
    found = [line for line in done.stdout.splitlines() if "cases are right" in line]
    assert (done.returncode, sorted(found)) == (0, said), done.stdout[-4000:] + done.stderr[-4000:]


def test_random_calls_on_cpu():
    assert_right("cpu", 3, 20)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_many_random_calls_on_cpu(ranks):
    assert_right("cpu", ranks, 150, "--seed", 1 + ranks)


@pytest.mark.gpu
def test_random_calls_give_the_bits_of_reference_on_gpus():
    """On one GPU its two ranks take turns; on several each rank has its own."""
    if not torch.cuda.is_available():
        pytest.skip("needs 1 GPU, 0 are here")
    assert_right("cuda", max(2, torch.cuda.device_count()), 40)
