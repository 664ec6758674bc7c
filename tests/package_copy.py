"""A copy of the Python package, for tests that add a file to it and see it found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from toolchains import ROOT

from tracekern import _C


@dataclass(frozen=True)
class PackageCopy:
    root: Path
    """Holds tracekern/, its viewers and its compiled part in it."""

    @classmethod
    def make(cls, root: Path) -> PackageCopy:
        package = root / "tracekern"
        left_out = shutil.ignore_patterns("*.so", "__pycache__", "include")
        shutil.copytree(ROOT / "tracekern", package, ignore=left_out)  # follows the link to viewers
        (package / Path(_C.__file__).name).symlink_to(_C.__file__)
        return cls(root)

    def add(self, path: str, text: str) -> None:
        """Adds a file that was not there before."""
        with (self.root / "tracekern" / path).open("x") as file:
            file.write(text)

    def run(self, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs Python with this package, and with the modules of tests."""
        environment = {**os.environ, "PYTHONPATH": f"{self.root}:{ROOT / 'tests'}", "COLUMNS": "200"}
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
