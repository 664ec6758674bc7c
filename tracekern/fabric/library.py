"""Finds libfabric and the compiled part that uses it, when the first engine asks: a process may fork before."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

from tracekern.errors import NotBuilt

_MPICH = "mpich"
"""The package of PyPI whose wheel has a libfabric with all software providers."""
_LIBRARY, _PROVIDERS = "libfabric.so.1", "libfabric"


def native() -> Any:
    """Returns tracekern._fabric. Raises NotBuilt."""
    from tracekern import _fabric

    return _fabric


def find_library() -> str:
    """Returns the path of libfabric.so.1 from PyPI's mpich; "" for that of the system.

    Sets FI_PROVIDER_PATH for the former, whose own default is a folder that is not there, unless it is set.
    """
    try:
        files = importlib.metadata.files(_MPICH) or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    found = [file for file in files if file.name == _LIBRARY]
    if not found:
        return ""
    library = Path(str(found[0].locate())).resolve()
    os.environ.setdefault("FI_PROVIDER_PATH", str(library.parent / _PROVIDERS))
    return str(library)


def require_library() -> str:
    """Returns the path of a libfabric that loads, as find_library() does. Raises NotBuilt that says what to install."""
    library = find_library()
    try:
        native().library_version(library)
    except RuntimeError as error:
        raise NotBuilt(f"{error}; install it: pip install mpich==5.0.2, or Debian's libfabric1") from None
    return library
