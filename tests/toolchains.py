"""The compilers that tests use, and a cache of what they made, so that a second run compiles nothing.

An entry is named by a hash of the command, the compiler's version and every file that the source includes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CACHE = ROOT / "build" / "tests"

GXX = ("g++", "-std=c++20", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra", "-Werror")
# One number type stands for all in kernels.cu, and no ring, unless `make soak` wants them all.
SAMPLE = () if os.environ.get("TRACEKERN_ALL_KERNELS") else ("-DTK_SAMPLE",)
NVCC = ("nvcc", "-arch=sm_90", "-std=c++20", "-Werror", "all-warnings", *SAMPLE)
AMD_TARGETS = ("gfx942", "gfx90a")

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def hip_command(target: str) -> tuple[str, ...]:
    """clang for one AMD target, without any ROCm installed."""
    flags = ("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib")
    return ("clang++-19", *flags, f"--offload-arch={target}", "-O3", "-std=c++20", "-Wall", "-Werror", *SAMPLE)


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


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


def included_files(source: Path, include: Path) -> list[Path]:
    """`source` and every file of ours that it includes, directly or not."""
    found: dict[Path, None] = {}
    stack = [source]
    while stack:
        path = stack.pop()
        if path in found:
            continue
        found[path] = None
        for name in _INCLUDE.findall(path.read_text()):
            candidates = [folder / name for folder in (path.parent, include) if (folder / name).is_file()]
            stack += candidates[:1]
    return sorted(found)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_cached(command: tuple[str, ...], source: Path, suffix: str, include: Path = CSRC) -> Path:
    """Runs `command -I include -o RESULT source` unless that was done before; returns RESULT.

    What the compiler printed stands next to it, see `compiler_output`. Skips where the compiler is missing, fails with
    its messages where it refuses.
    """
    require(command[0])
    hashed = hashlib.sha256(repr((command, _version(command[0]))).encode())
    for path in included_files(source, include):
        hashed.update(path.name.encode() + path.read_bytes())
    CACHE.mkdir(parents=True, exist_ok=True)
    result = CACHE / f"{source.stem}-{hashed.hexdigest()[:20]}{suffix}"
    with _locked(result.with_suffix(".lock")):
        if result.exists():
            return result
        partial = result.with_suffix(f".{os.getpid()}{suffix}")
        full = [*command, f"-I{include}", "-o", str(partial), str(source)]
        done = subprocess.run(full, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(full)}:\n{done.stderr}"
        compiler_output(result).write_text(done.stderr)
        partial.rename(result)
    return result


def compiler_output(result: Path) -> Path:
    """Where compile_cached() kept the compiler's messages."""
    return result.with_suffix(".log")


def compile_sm_90(source: Path, *, include: Path = CSRC, strict: bool = True) -> tuple[Path, Path]:
    """PTX, and the cubin made of it; what ptxas says of registers and stack stands next to the cubin."""
    command = NVCC if strict else tuple(word for word in NVCC if word not in ("-Werror", "all-warnings"))
    ptx = compile_cached((*command, "-ptx"), source, ".ptx", include)
    return ptx, compile_cached(("nvcc", "-arch=sm_90", "-cubin", "-Xptxas", "-v"), ptx, ".cubin")


def program(name: str, *flags: str) -> Path:
    """tests/cpp/NAME.cpp, built for the CPU backend with `flags`."""
    return compile_cached((*GXX, *flags), ROOT / "tests" / "cpp" / f"{name}.cpp", "")
