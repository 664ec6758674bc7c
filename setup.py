"""Builds tracekern._C with g++ and pybind11, and its twin for GPUs, tracekern._cuda, where nvcc is."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ParallelCompile("TRACEKERN_BUILD_JOBS", default=os.cpu_count() or 1).install()

HEADERS = [path for pattern in ("csrc/**/*.h", "csrc/**/*.hpp") for path in glob.glob(pattern, recursive=True)]
FOLDERS = ("apis", "encode", "moe/*")
SOURCES = ["csrc/python_api.cpp", *(path for folder in FOLDERS for path in sorted(glob.glob(f"csrc/{folder}/*.cpp")))]
KERNELS = sorted(glob.glob("csrc/**/kernels.cu", recursive=True))
BINDINGS = sorted(glob.glob("csrc/apis/*.cu") + glob.glob("csrc/moe/*/bindings.cu"))
CUDA_SOURCES = ["csrc/python_api_cuda.cu", *BINDINGS, *KERNELS]
# A folder is a family of kernels; csrc/apis/register.hpp registers them all.
FAMILIES = " ".join(f"FAMILY({Path(path).parent.name})" for path in sorted(glob.glob("csrc/moe/*/bindings.cpp")))
NVCC = None if os.environ.get("TRACEKERN_CUDA") == "0" else shutil.which("nvcc")  # 0: leave the GPU twin out
NVCC_DEFINES = ["-DTK_KERNEL_TABLE", f"-DTK_FAMILIES={FAMILIES}"]
NVCC_FLAGS = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC", "-Icsrc", *NVCC_DEFINES, "--split-compile=0"]


# A warning of a compiler that we have not seen is no reason not to build; .ci/run sets this.
STRICT = ["-Werror"] if os.environ.get("TRACEKERN_WERROR") == "1" else []


def architecture_here() -> str:
    """Of the first GPU of this machine; of an H100 where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        found = []
    return f"sm_{found[0].replace('.', '')}" if found and found[0].replace(".", "").isdigit() else "sm_90"


class BuildExtensions(build_ext):
    """build_ext that hands .cu files to nvcc."""

    def build_extension(self, extension: Extension) -> None:
        if extension.name != "tracekern._cuda":
            super().build_extension(extension)
            return
        target = Path(self.get_ext_fullpath(extension.name))
        newest = max(os.path.getmtime(path) for path in [*extension.sources, *extension.depends])
        if not self.force and target.exists() and target.stat().st_mtime > newest:
            return
        includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
        architecture = os.environ.get("TRACEKERN_CUDA_ARCH") or architecture_here()
        objects, compilers = [], []
        for source in extension.sources:
            out = Path(self.build_temp, source).with_suffix(".cu.o")
            out.parent.mkdir(parents=True, exist_ok=True)
            extra = os.environ.get("TRACEKERN_NVCC_FLAGS", "").split()
            command = [NVCC, f"-arch={architecture}", *NVCC_FLAGS, *extra, *includes, "-c", source, "-o", str(out)]
            self.announce(f"nvcc {architecture}: {source}", level=2)
            compilers.append(subprocess.Popen(command))
            objects.append(str(out))
        if any(compiler.wait() for compiler in compilers):
            raise RuntimeError("nvcc failed; see its lines above")
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([NVCC, "-shared", "-o", str(target), *objects], check=True)


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
    )
]
if NVCC:
    extensions.append(Extension("tracekern._cuda", CUDA_SOURCES, depends=HEADERS))

setup(ext_modules=extensions, cmdclass={"build_ext": BuildExtensions})
