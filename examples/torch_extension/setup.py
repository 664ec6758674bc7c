"""Builds square_extension with torch.utils.cpp_extension; all that tracing adds is the include folder."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

import tracekern

setup(
    name="square_extension",
    ext_modules=[
        CUDAExtension(
            "square_extension",
            ["binding.cpp", "square.cu"],
            include_dirs=[tracekern.include_path()],
            extra_compile_args={"cxx": ["-std=c++20", "-O2"], "nvcc": ["-std=c++20", "-O3"]},
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
)
