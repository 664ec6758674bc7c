"""The compilers that tests use. What they make is kept, see kept_builds.py."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from kept_builds import build
from paths import ROOT

CSRC = ROOT / "csrc"

GXX = ("g++", "-std=c++20", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra", "-Werror")
IS_SAMPLE = not os.environ.get("TRACEKERN_ALL_KERNELS")
"""One number type and the records of one format stand for all in kernels.cu, unless `make soak` wants them all."""
ONE_NUMBER = ("-DTK_ONE_NUMBER",) if IS_SAMPLE else ()


def formats(*names: str) -> tuple[str, ...]:
    """Flags that leave out the bodies of the other formats, and of number types but one."""
    listed = ", ".join(f"RecordFormat::{name}" for name in names)
    return (*ONE_NUMBER, f"-DTK_FORMATS={listed}") if IS_SAMPLE else ()


SAMPLE = formats("span")
NVCC = ("nvcc", "-arch=sm_90", "-std=c++20", "-Werror", "all-warnings", *SAMPLE)
NVCC_90A = ("nvcc", "-arch=sm_90a", *NVCC[2:])
"""With the instructions of 9.0 alone, as setup.py builds for it: without them some bodies are a trap."""
AMD_TARGETS = ("gfx942", "gfx90a")


def hip_command(target: str) -> tuple[str, ...]:
    """clang for one AMD target, without any ROCm installed."""
    flags = ("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib")
    return ("clang++-19", *flags, f"--offload-arch={target}", "-O3", "-std=c++20", "-Wall", "-Werror", *SAMPLE)


PACKAGES = {"g++": "apt-get install g++", "nvcc": "CUDA toolkit", "clang++-19": "apt-get install clang-19 lld-19"}


def require(compiler: str) -> None:
    """Skips the test, with the reason, where the compiler is missing."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed ({PACKAGES[compiler]})")


def sanitizer(tool: str) -> tuple[str, ...]:
    """The command in front of a program's: exits with 9 where the tool finds something. Skips where it is missing."""
    path = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(path):
        pytest.skip("needs compute-sanitizer")
    return (path, "--tool", tool, "--error-exitcode", "9")


def compile_cached(command: tuple[str, ...], source: Path, suffix: str, include: Path = CSRC) -> Path:
    """Runs `command -I include -o RESULT source` unless that was done before; returns RESULT.

    What the compiler printed is in log_of(RESULT). Skips where the compiler is missing, fails with its messages where
    it refuses.
    """
    require(command[0])
    done = build((*command, f"-I{include}"), [source], suffix)
    assert done.returncode == 0, f"{' '.join(command)} {source}:\n{done.stderr}"
    return done.result


@functools.cache
def ptxas_flags() -> tuple[str, ...]:
    """What ptxas says of registers and stack, without its advice on each sparse product, as setup.py has it."""
    flag = "--suppress-sparse-mma-advisory-info"
    shown = subprocess.run(["ptxas", "--help"], capture_output=True, text=True).stdout if shutil.which("ptxas") else ""
    return ("-Xptxas", "-v", *(("-Xptxas", flag) if flag in shown else ()))


def compile_sm_90(source: Path, *, include: Path = CSRC, strict: bool = True) -> tuple[Path, Path]:
    """PTX, and the cubin made of it; what ptxas says of registers and stack stands next to the cubin."""
    command = NVCC_90A if strict else tuple(word for word in NVCC_90A if word not in ("-Werror", "all-warnings"))
    ptx = compile_cached((*command, "-ptx"), source, ".ptx", include)
    return ptx, compile_cached(("nvcc", "-arch=sm_90a", "-cubin", *ptxas_flags()), ptx, ".cubin")


@functools.cache
def program(name: str, *flags: str) -> Path:
    """tests/cpp/NAME.cpp, built for the CPU backend with `flags`."""
    return compile_cached((*GXX, *flags), ROOT / "tests" / "cpp" / f"{name}.cpp", "")
