"""Loads the compiled parts that most commands do not need: the families of kernels, and the transfer engine.

A checkout compiles such a part when a command first needs it, and again when its sources have changed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from tracekern.errors import NotBuilt

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent
_HOW = {"fabric": "where libfabric's headers are (Debian: libfabric-dev)"}
"""Part -> what building it takes besides a compiler."""


@functools.cache
def compiled(name: str) -> Any:
    """Returns the extension tracekern._NAME. Raises NotBuilt, in one line."""
    from tracekern import _core  # noqa: F401 - it has the types that the others take

    if (_CHECKOUT / "csrc").is_dir():
        _build(name)
    try:
        return importlib.import_module(f"tracekern._{name}")
    except ModuleNotFoundError:
        how = _HOW.get(name, "with g++ (C++20)")
        raise NotBuilt(
            f"tracekern was installed without tracekern._{name}; {how}, run `python -m pip install --force-reinstall "
            "--no-deps .` in its source"
        ) from None
    except ImportError as error:
        raise NotBuilt(f"tracekern._{name}: {error}; run `python -m pip install -e .` in {_CHECKOUT}") from None


def sources_of(name: str, csrc: Path) -> list[Path]:
    """Returns the files of csrc that tracekern._NAME is made of: its own folder, and the headers that all share."""
    own = csrc / "fabric" if name == "fabric" else csrc / "moe" / name
    shared = (path for part in ("platform", "trace", "comm", "apis", "moe") for path in csrc.glob(f"{part}/*.h*"))
    return sorted([*shared, *(path for path in own.rglob("*") if path.suffix in {".h", ".hpp", ".cpp"})])


def _build(name: str) -> None:
    """Compiles a part of this checkout if it is missing or older than its sources. Raises NotBuilt."""
    target = _PACKAGE / f"_{name}{EXTENSION_SUFFIXES[0]}"
    if target.exists() and not _is_old(target, sources_of(name, _CHECKOUT / "csrc")):
        return
    if not os.access(_PACKAGE, os.W_OK):
        if target.exists():
            return
        raise NotBuilt(f"tracekern._{name} is not built, and {_PACKAGE} cannot be written; run a command there once")
    if missing := [package for package in ("pybind11", "setuptools") if importlib.util.find_spec(package) is None]:
        raise NotBuilt(
            f"tracekern._{name} has to be built from {_CHECKOUT}, which needs {' and '.join(missing)}: "
            f"python -m pip install {' '.join(missing)}"
        )
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    about = {**os.environ, "TRACEKERN_PARTS": name, "TRACEKERN_EXTENSION": "1", "TRACEKERN_CUDA": "0"}
    # Each file is shown as it is compiled; standard output is the command's own.
    if subprocess.run(command, cwd=_CHECKOUT, env=about, stdout=sys.stderr).returncode != 0:
        raise NotBuilt(f"tracekern._{name} cannot be built, see above; in {_CHECKOUT}: {' '.join(command)}")


def _is_old(target: Path, sources: list[Path]) -> bool:
    built = target.stat().st_mtime
    return any(path.stat().st_mtime > built for path in sources)
