"""Builds tracekern._C, the CPU extension: recorder layout, CPU backend, bundled kernels, trace encoder.

Needs g++ and pybind11.
"""

import glob
import os

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile("TRACEKERN_BUILD_JOBS", default=os.cpu_count() or 1).install()

HEADERS = [path for pattern in ("csrc/**/*.h", "csrc/**/*.hpp") for path in glob.glob(pattern, recursive=True)]
SOURCES = ["csrc/python_api.cpp", *sorted(glob.glob("csrc/apis/*.cpp")), *sorted(glob.glob("csrc/encode/*.cpp"))]

setup(
    ext_modules=[
        Pybind11Extension(
            "tracekern._C",
            SOURCES,
            include_dirs=["csrc"],
            depends=HEADERS,
            cxx_std=20,
            # Kernels promise bit-equal results on every backend: a*b+c must stay two roundings.
            extra_compile_args=["-O2", "-g0", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread"],
            extra_link_args=["-pthread", "-lrt"],
        )
    ]
)
