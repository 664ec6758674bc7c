"""Builds tracekern._C with g++ and pybind11, and its twin for GPUs, tracekern._cuda, with nvcc.

Environment variables, of which the README explains the first two:
    TRACEKERN_CUDA=0 or 1        leaves _cuda out, or insists on it; else it is built where nvcc and a GPU are
    TRACEKERN_EXTENSION=1        insists on _C; else an installation where it cannot be compiled reads captures
    TRACEKERN_CUDA_ARCH=sm_90    the architecture to compile for; else that of the first GPU here
    TRACEKERN_BUILD_JOBS=4       how many compilers run at a time; else one for each core
    TRACEKERN_WERROR=1, TRACEKERN_NVCC_FLAGS    for development
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

HEADERS = [path for pattern in ("csrc/**/*.h", "csrc/**/*.hpp") for path in glob.glob(pattern, recursive=True)]
FOLDERS = ("apis", "encode", "moe/*")
SOURCES = ["csrc/python_api.cpp", *(path for folder in FOLDERS for path in sorted(glob.glob(f"csrc/{folder}/*.cpp")))]
KERNELS = sorted(glob.glob("csrc/**/kernels.cu", recursive=True))
BINDINGS = sorted(glob.glob("csrc/apis/*.cu") + glob.glob("csrc/moe/*/bindings.cu"))
CUDA_SOURCES = [*KERNELS, *BINDINGS, "csrc/python_api_cuda.cu"]  # those that take longest first
# A folder is a family of kernels; csrc/apis/register.hpp registers them all.
FAMILIES = " ".join(f"FAMILY({Path(path).parent.name})" for path in sorted(glob.glob("csrc/moe/*/bindings.cpp")))
NVCC_DEFINES = ["-DTK_KERNEL_TABLE", f"-DTK_FAMILIES={FAMILIES}"]
NVCC_FLAGS = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC", "-Icsrc", *NVCC_DEFINES]
# A warning of a compiler that we have not seen is no reason not to build; .ci/run sets this.
STRICT = ["-Werror"] if os.environ.get("TRACEKERN_WERROR") == "1" else []


def count_jobs() -> int:
    """Returns how many compilers may run at a time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("TRACEKERN_BUILD_JOBS") or str(cores)
    if not asked.isdecimal() or int(asked) == 0:
        raise SystemExit(f"TRACEKERN_BUILD_JOBS is {asked!r}; wanted how many compilers may run at a time, such as 4")
    return int(asked)


def architectures_here() -> list[str]:
    """Returns the architectures of this machine's GPUs, such as sm_90."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [f"sm_{number}" for number in (text.replace(".", "") for text in found) if number.isdigit()]


def find_nvcc() -> str | None:
    """Returns the nvcc that is to build _cuda; None if it is left out."""
    asked = os.environ.get("TRACEKERN_CUDA", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"TRACEKERN_CUDA is {asked!r}; wanted 1 to build the kernels for GPUs, 0 to leave them out")
    nvcc = shutil.which("nvcc")
    if asked == "1" and not nvcc:
        raise SystemExit("TRACEKERN_CUDA=1, but there is no nvcc on the PATH; add it (PATH=/usr/local/cuda/bin:$PATH)")
    if asked == "0" or not nvcc:
        return None
    # Not every container with a GPU has nvidia-smi, and WSL has no such file.
    is_wanted = asked == "1" or glob.glob("/dev/nvidia[0-9]*") or architectures_here()
    return nvcc if is_wanted else None


def quiet_flags() -> list[str]:
    """Returns flags against a line of ptxas for each sparse product whose metadata has no order, where it has them."""
    flag = "--suppress-sparse-mma-advisory-info"
    try:
        known = subprocess.run(["ptxas", "--help"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ["-Xptxas", flag] if flag in known else []


JOBS = count_jobs()
ParallelCompile(default=JOBS).install()
NVCC = find_nvcc()
# The library itself is loaded when an engine is made: without the headers only that part is left out.
FABRIC_HEADERS = next(
    (
        folder
        for folder in (*os.environ.get("CPATH", "").split(os.pathsep), "/usr/include", "/usr/local/include")
        if folder and Path(folder, "rdma", "fabric.h").exists()
    ),
    None,
)
# A build for GPUs, or the command build_ext, is not for reading captures alone.
IS_REQUIRED = os.environ.get("TRACEKERN_EXTENSION") == "1" or NVCC is not None or "build_ext" in sys.argv


class BuildExtensions(build_ext):
    """build_ext that hands .cu files to nvcc, and goes on where _C cannot be compiled and is not required."""

    def run(self) -> None:
        if not NVCC and not os.environ.get("TRACEKERN_CUDA") and shutil.which("nvcc"):
            left_out = "tracekern._cuda is left out: nvcc is here, but no GPU; TRACEKERN_CUDA=1 builds it"
            self.announce(left_out, level=logging.WARNING)
        super().run()

    def build_extension(self, extension: Extension) -> None:
        if extension.name == "tracekern._cuda":
            self.build_cuda(extension)
            return
        try:
            super().build_extension(extension)
        except (BaseError, CCompilerError, OSError) as error:
            if IS_REQUIRED:
                raise CompileError(f"tracekern._C cannot be compiled; it needs g++ with C++20: {error}") from error
            self.announce(
                f"tracekern._C is left out, as it cannot be compiled here ({error}): what is installed reads "
                "captures, but cannot record or write Perfetto traces; TRACEKERN_EXTENSION=1 makes this an error",
                level=logging.WARNING,
            )

    def build_cuda(self, extension: Extension) -> None:
        target = Path(self.get_ext_fullpath(extension.name))
        newest = max(os.path.getmtime(path) for path in [*extension.sources, *extension.depends])
        if not self.force and target.exists() and target.stat().st_mtime > newest:
            return
        architecture = os.environ.get("TRACEKERN_CUDA_ARCH") or next(iter(architectures_here()), "sm_90")
        architecture = {"sm_90": "sm_90a"}.get(architecture, architecture)  # warpgroup products are in no other
        num_files = len(extension.sources)
        command = [
            *(
                NVCC,
                f"-arch={architecture}",
                *NVCC_FLAGS,
                *quiet_flags(),
                f"--split-compile={max(1, JOBS // num_files)}",
            ),
            *os.environ.get("TRACEKERN_NVCC_FLAGS", "").split(),
            *(f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"),
        ]

        def compile_file(number: int, source: str) -> str:
            out = Path(self.build_temp, source).with_suffix(".cu.o")
            out.parent.mkdir(parents=True, exist_ok=True)
            self.announce(f"[{number}/{num_files}] nvcc {architecture} {source}", level=logging.INFO)
            subprocess.run([*command, "-c", source, "-o", str(out)], check=True)
            return str(out)

        try:
            with ThreadPoolExecutor(JOBS) as pool:
                objects = list(pool.map(compile_file, range(1, num_files + 1), extension.sources))
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([NVCC, "-shared", "-o", str(target), *objects], check=True)
        except subprocess.CalledProcessError as error:
            raise CompileError(
                f"nvcc ended with {error.returncode}, see its lines above; TRACEKERN_CUDA=0 leaves the GPU part out"
            ) from None


extensions = [
    Pybind11Extension(
        "tracekern._C",
        SOURCES,
        include_dirs=["csrc"],
        define_macros=[("TK_FAMILIES", FAMILIES)],
        depends=HEADERS,
        cxx_std=20,
        # Kernels promise bit-equal results on every backend: a*b+c must stay two roundings.
        extra_compile_args=["-O2", "-g0", "-Wall", "-Wextra", *STRICT, "-ffp-contract=off", "-pthread"],
        extra_link_args=["-pthread", "-lrt"],
        optional=not IS_REQUIRED,  # an editable installation does not look for what was left out
    )
]
if FABRIC_HEADERS:
    extensions.append(
        Pybind11Extension(
            "tracekern._fabric",
            ["csrc/fabric/bindings.cpp"],
            include_dirs=["csrc", FABRIC_HEADERS],
            depends=HEADERS,
            cxx_std=20,
            extra_compile_args=["-O2", "-g0", "-Wall", "-Wextra", *STRICT, "-pthread"],
            extra_link_args=["-pthread", "-ldl"],
            optional=True,
        )
    )
if NVCC:
    extensions.append(Extension("tracekern._cuda", CUDA_SOURCES, depends=HEADERS))

setup(ext_modules=extensions, cmdclass={"build_ext": BuildExtensions})
