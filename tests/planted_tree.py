"""A copy of this tree whose GPU kernels leave out a part of their protocol when they are told to.

    python tests/planted_tree.py DIRECTORY

Takes as long as building the extension; gpu_mutants.py runs in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from paths import ROOT

FLAGS = "-DTK_PLANTED_FAULTS -DTK_RANDOM_DELAYS"
LEFT_BEHIND = (".*", "build", "traces", "_*.so")


def build(directory: Path) -> Path:
    """Returns `directory`, made anew. Raises CalledProcessError, with what the compilers said."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(ROOT, directory, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    environment = {**os.environ, "TRACEKERN_NVCC_FLAGS": FLAGS}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=directory, env=environment, check=True, stdout=subprocess.DEVNULL)
    return directory


if __name__ == "__main__":
    build(Path(sys.argv[1]).absolute())
