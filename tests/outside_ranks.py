"""A program for test_from_outside.py: a library that asks for its launches, in ranks of torchrun.

python outside_ranks.py CASE MY_KERNEL: CASE says how it goes, MY_KERNEL is the compiled examples/my_kernel.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import torch.distributed as dist

import tracekern

LAUNCHES = 4
LATE_S = 5


def load_kernel(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("my_kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(kernel: ModuleType) -> bool:
    matrix = np.full((8, 16), 2, np.float32)
    launch = tracekern.launch("square", grid=2, warps=2, events=kernel.events(), key="layer 0")
    kernel.square(matrix, launch.descriptor, launch.grid, launch.warps)
    assert (matrix == 4).all()
    return launch.traced


def main() -> None:
    case, kernel = sys.argv[1], load_kernel(sys.argv[2])
    if case == "in order":
        assert not step(kernel), "torch.distributed is not there yet"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if case == "never launches" and rank == 1:
        time.sleep(LATE_S)
    else:
        traced = [step(kernel) for _ in range(LAUNCHES)]
        Path(f"traced-{rank}").write_text(str(sum(traced)))
    if case == "fails":
        if rank == 1:
            sys.exit(3)
        time.sleep(50)
        Path(f"slept-{rank}").touch()
    dist.barrier(dist.new_group())
    if case == "in order":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
