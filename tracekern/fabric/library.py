"""Finds libfabric and the compiled part that uses it, when the first engine asks: a process may fork before."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

from tracekern.compiled import compiled
from tracekern.errors import NotBuilt

_NAMED = "TRACEKERN_LIBFABRIC"
"""The variable that names another libfabric.so.1, such as that of an EFA installation."""
_MPICH = "mpich"
"""The package of PyPI whose wheel has a libfabric with all software providers."""
_LIBRARY, _PROVIDERS = "libfabric.so.1", "libfabric"


def native() -> Any:
    """Returns tracekern._fabric. Raises NotBuilt."""
    return compiled("fabric")


def find_library() -> str:
    """Returns the path of libfabric.so.1: TRACEKERN_LIBFABRIC, or that of PyPI's mpich; "" for the system's.

    Sets FI_PROVIDER_PATH for mpich's, whose own default is a folder that is not there, unless it is set.
    """
    if named := os.environ.get(_NAMED):
        return named
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
        if library and library == os.environ.get(_NAMED):
            raise NotBuilt(f"{_NAMED}: {error}; set it to the path of a libfabric.so.1, or unset it") from None
        raise NotBuilt(f"{error}; install it: python -m pip install mpich==5.0.2, or Debian's libfabric1") from None
    return library
