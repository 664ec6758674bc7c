"""A GPU that is full of another kernel: its clock is read when there is room again."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
import torch
from toolchains import NVCC, ROOT, compile_cached

from tests.devices import require_gpus
from tracekern.comm.devices.device import open_device
from tracekern.comm.ranks.group import Group

SHARED_LIBRARY = (*NVCC, "-shared", "-Xcompiler", "-fPIC")
FULL_S = 3
"""Longer than the kernel that reads the clock waits for the host: 2 s."""


@pytest.mark.gpu
def test_the_clock_of_a_full_gpu_is_read_when_there_is_room(tmp_path):
    require_gpus(1)
    filler = ctypes.CDLL(str(compile_cached(SHARED_LIBRARY, ROOT / "tests" / "cpp" / "full_gpu.cu", ".so")))
    device = open_device("cuda", Group(0, 1))
    device.clock.read_brackets(1)  # its kernel is loaded
    started = time.monotonic()
    with device.active():
        assert filler.fill_gpu(ctypes.c_uint64(FULL_S * 10**9)) == 0
    brackets = device.clock.read_brackets(20)
    assert time.monotonic() - started > FULL_S - 0.5  # it was full
    assert len(brackets) == 20
    assert (np.diff(brackets[:, 1]) > 0).all()
    torch.cuda.synchronize()
