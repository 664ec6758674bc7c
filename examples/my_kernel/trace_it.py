"""Builds my_kernel.cpp, runs it under a capture, and leaves the capture in my-capture/.

python examples/my_kernel/trace_it.py && tracekern export my-capture -o my-capture/trace.pftrace.gz
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pybind11

import tracekern

HERE = Path(__file__).parent
MODULE = HERE / f"my_kernel{sysconfig.get_config_var('EXT_SUFFIX')}"

includes = [tracekern.include_path(), pybind11.get_include(), sysconfig.get_path("include")]
flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", *(f"-I{path}" for path in includes)]
print("building my_kernel.cpp, some seconds")
subprocess.run(["g++", *flags, HERE / "my_kernel.cpp", "-o", MODULE], check=True)

sys.path.insert(0, str(HERE))
import my_kernel  # noqa: E402 - built just now

matrix = np.full((64, 1000), 1.5, np.float32)
with tracekern.capture("my-capture") as capture:
    for _ in range(3):
        launch = capture.launch("square", grid=4, warps=2, events=my_kernel.events())
        my_kernel.square(matrix, launch.descriptor, launch.grid, launch.warps)

assert (matrix == np.float32(1.5) ** 8).all()
print("three launches of square are in my-capture/   show them: tracekern open my-capture")
