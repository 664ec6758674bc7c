"""Takes the place of the kernels for GPUs where they were not built: Python prefers the extension of this name."""

from tracekern.errors import NotBuilt

raise NotBuilt(
    "tracekern was installed without its kernels for GPUs; where nvcc is, run `TRACEKERN_CUDA=1 python -m pip install "
    "--force-reinstall --no-deps .` in its source"
)
