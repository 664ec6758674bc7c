"""Builds the extensions of tracekern: _core and one for each family of kernels with g++, _cuda with nvcc.

Environment variables, of which the README explains the first two:
    TRACEKERN_CUDA=0 or 1        leaves _cuda out, or insists on it; else it is built where nvcc and a GPU are
    TRACEKERN_EXTENSION=1        insists on _core; else an installation where it cannot be compiled reads captures
    TRACEKERN_PARTS=core,p2p     builds these alone (none: nothing); a checkout builds others when a command needs them
    TRACEKERN_CUDA_ARCH=sm_90    the architecture to compile for; else that of the first GPU here
    TRACEKERN_BUILD_JOBS=4       how many compilers run at a time; else one for each core
    TRACEKERN_WERROR=1, TRACEKERN_NVCC_FLAGS    for development
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tracekern.compiled import sources_of  # noqa: E402

STARTED = time.time()
CSRC = Path("csrc")
# A folder is a family of kernels, and a module.
FAMILIES = [path.parent.name for path in sorted(CSRC.glob("moe/*/bindings.cpp"))]
KERNELS = sorted(glob.glob("csrc/**/*kernels.cu", recursive=True))
BINDINGS = sorted(glob.glob("csrc/apis/*.cu") + glob.glob("csrc/moe/*/bindings.cu"))
CUDA_SOURCES = [*KERNELS, *BINDINGS, "csrc/python_api_cuda.cu"]  # those that take longest first
NVCC_FAMILIES = " ".join(f"FAMILY({name})" for name in FAMILIES)
NVCC_DEFINES = ["-DTK_KERNEL_TABLE", f"-DTK_FAMILIES={NVCC_FAMILIES}"]
NVCC_FLAGS = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC", "-Icsrc", *NVCC_DEFINES]
# A warning of a compiler that we have not seen is no reason not to build; .ci/run sets this.
STRICT = ["-Werror"] if os.environ.get("TRACEKERN_WERROR") == "1" else []
# Kernels promise bit-equal results on every backend: a*b+c must stay two roundings.
GXX_FLAGS = ["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", *STRICT, "-ffp-contract=off"]
# For tests: engines then assert the rule of csrc/fabric/rule.hpp.
CHECKED = [("TRACEKERN_CHECKED", "1")] if os.environ.get("TRACEKERN_CHECKED") == "1" else []


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


def shared_headers() -> list[str]:
    """Returns the headers that decide what extensions hand each other."""
    return sorted(str(path) for part in ("platform", "trace", "comm", "apis") for path in CSRC.glob(f"{part}/*.h*"))


def built_from() -> str:
    """Returns a hash of these headers: csrc/apis/built_from.hpp."""
    return hashlib.sha256(b"".join(Path(name).read_bytes() for name in shared_headers())).hexdigest()[:16]


def host_extension(name: str, sources: list[str], depends: list[str], **more: object) -> Extension:
    """Returns an extension that g++ builds."""
    return Extension(
        f"tracekern._{name}",
        sources,
        include_dirs=["csrc", pybind11.get_include()],
        depends=depends,
        define_macros=[("TK_BUILT_FROM", f'"{built_from()}"'), *CHECKED],
        extra_compile_args=[*GXX_FLAGS, "-pthread"],
        optional=not IS_REQUIRED,  # an editable installation does not look for what was left out
        **more,
    )


def wanted_extensions() -> list[Extension]:
    """Returns those of TRACEKERN_PARTS, or all; those that take longest first."""
    headers = [path for pattern in ("csrc/**/*.h", "csrc/**/*.hpp") for path in glob.glob(pattern, recursive=True)]
    found = {}
    for name in FAMILIES:
        depends = [str(path) for path in sources_of(name, CSRC)]
        sources = [path for path in depends if path.endswith(".cpp")]
        found[name] = host_extension(name, sources, depends, extra_link_args=["-pthread", "-lrt"])
    if FABRIC_HEADERS:
        depends = [str(path) for path in sources_of("fabric", CSRC)]
        found["fabric"] = host_extension("fabric", ["csrc/fabric/bindings.cpp"], depends, extra_link_args=["-ldl"])
        found["fabric"].include_dirs.append(FABRIC_HEADERS)
    core = ["csrc/python_api.cpp", *(path for part in ("apis", "encode") for path in glob.glob(f"csrc/{part}/*.cpp"))]
    of_core = [*shared_headers(), *glob.glob("csrc/encode/*.h*")]  # a change in one family builds no other part
    found["core"] = host_extension("core", sorted(core), of_core, extra_link_args=["-pthread", "-lrt"])
    if NVCC:
        found["cuda"] = Extension("tracekern._cuda", CUDA_SOURCES, depends=headers)
    asked = os.environ.get("TRACEKERN_PARTS", "").replace(",", " ").split() or list(found)
    if asked == ["none"]:
        return []
    if unknown := [name for name in asked if name not in found and name != "fabric"]:
        raise SystemExit(f"TRACEKERN_PARTS names {unknown[0]!r}; wanted some of {', '.join(found)}")
    if "fabric" in asked and not FABRIC_HEADERS and "TRACEKERN_PARTS" in os.environ:
        raise SystemExit("tracekern._fabric needs libfabric's headers; on Debian: apt-get install libfabric-dev")
    return [extension for name, extension in found.items() if name in asked]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets one process at a time build in this folder: ranks may ask for the same part at once."""
    try:
        import fcntl
    except ModuleNotFoundError:  # nothing can be compiled there
        yield
        return
    Path("build").mkdir(exist_ok=True)
    with open("build/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class BuildExtensions(build_ext):
    """build_ext that compiles the files of all extensions side by side, each by g++ or nvcc, and shows them.

    It goes on where an extension cannot be compiled and is not required.
    """

    def run(self) -> None:
        if not NVCC and not os.environ.get("TRACEKERN_CUDA") and shutil.which("nvcc"):
            left_out = "tracekern._cuda is left out: nvcc is here, but no GPU; TRACEKERN_CUDA=1 builds it"
            self.announce(left_out, level=logging.WARNING)
        with alone():
            super().run()

    def build_extensions(self) -> None:
        old = [extension for extension in self.extensions if self.force or self.is_old(extension)]
        files = [(extension, source) for extension in old for source in extension.sources]
        about = f"/{len(files)}]"
        nvcc_jobs = max(1, JOBS // max(1, len(CUDA_SOURCES)))

        def compile_file(number: int, extension: Extension, source: str) -> object:
            if source.endswith(".cu"):
                tool, compile_one = f"nvcc {architecture()}", self.nvcc(source, nvcc_jobs)
            else:
                tool, compile_one = "g++", self.gxx(extension, source)
            sys.stderr.write(f"[{number}{about} {tool} {source}\n")
            try:
                return compile_one()
            except (BaseError, CCompilerError, OSError, subprocess.CalledProcessError) as error:
                return error

        with ThreadPoolExecutor(JOBS) as pool:
            made = list(pool.map(compile_file, range(1, len(files) + 1), *zip(*files, strict=True))) if files else []
        for extension in reversed(old):
            own = [result for (owner, _), result in zip(files, made, strict=True) if owner is extension]
            self.finish(extension, own)

    def is_old(self, extension: Extension) -> bool:
        target = Path(self.get_ext_fullpath(extension.name))
        newest = max(os.path.getmtime(path) for path in [*extension.sources, *extension.depends])
        return not target.exists() or target.stat().st_mtime < newest

    def finish(self, extension: Extension, made: list[object]) -> None:
        """Links what the compilers made; raises, or leaves the extension out, where they failed."""
        errors = [result for result in made if isinstance(result, Exception)]
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if errors:
                raise errors[0]
            if extension.name == "tracekern._cuda":
                subprocess.run([NVCC, "-shared", "-o", str(target), *map(str, made)], check=True)
            else:
                self.compiler.link_shared_object(
                    list(map(str, made)), str(target), extra_postargs=extension.extra_link_args, target_lang="c++"
                )
        except subprocess.CalledProcessError as error:
            raise CompileError(
                f"nvcc ended with {error.returncode}, see its lines above; TRACEKERN_CUDA=0 leaves the GPU part out"
            ) from None
        except (BaseError, CCompilerError, OSError) as error:
            if IS_REQUIRED:
                raise CompileError(f"{extension.name} cannot be compiled; it needs g++ with C++20: {error}") from error
            self.announce(
                f"{extension.name} is left out, as it cannot be compiled here ({error}): what is installed reads "
                "captures, but cannot record or write Perfetto traces; TRACEKERN_EXTENSION=1 makes this an error",
                level=logging.WARNING,
            )

    def gxx(self, extension: Extension, source: str) -> Callable[[], str]:
        """Returns what compiles a file, and returns the object file."""
        return lambda: self.compiler.compile(
            [source],
            output_dir=self.build_temp,
            macros=extension.define_macros,
            include_dirs=[*extension.include_dirs, *self.include_dirs],
            extra_postargs=extension.extra_compile_args,
        )[0]

    def nvcc(self, source: str, num_jobs: int) -> Callable[[], str]:
        """The same with nvcc."""
        out = Path(self.build_temp, source).with_suffix(".cu.o")
        command = [
            *(NVCC, f"-arch={architecture()}", *NVCC_FLAGS, *quiet_flags(), f"--split-compile={num_jobs}"),
            *os.environ.get("TRACEKERN_NVCC_FLAGS", "").split(),
            *(f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"),
        ]

        def compile_one() -> str:
            out.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([*command, "-c", source, "-o", str(out)], check=True)
            return str(out)

        return compile_one

    def copy_file(self, source: str, target: str, *_: object, **__: object) -> object:
        """Copies under another name first: who imports the extension meanwhile has the old one, or the new one.

        Its time is that of the build's start: sources that were edited since are newer (tracekern/compiled.py).
        """
        partial = f"{target}.{os.getpid()}"
        shutil.copyfile(source, partial)
        os.utime(partial, (STARTED, STARTED))
        os.replace(partial, target)
        return target, True


@functools.cache
def architecture() -> str:
    """Returns the architecture that nvcc compiles for."""
    name = os.environ.get("TRACEKERN_CUDA_ARCH") or next(iter(architectures_here()), "sm_90")
    return {"sm_90": "sm_90a"}.get(name, name)  # warpgroup products are in no other


setup(ext_modules=wanted_extensions(), cmdclass={"build_ext": BuildExtensions})
