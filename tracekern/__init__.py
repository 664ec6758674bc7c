"""tracekern: what happens inside GPU kernels, on every rank, on one timeline.

Importing this package pulls in neither torch nor the compiled part; public names load what they need on first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "capture": "tracekern.record.session",
    "load": "tracekern.timeline.load",
    "TracekernError": "tracekern.errors",
}


def include_path() -> str:
    """Directory to pass to the compiler with -I for users' own kernels; then `#include <tracekern.h>`."""
    return str(Path(__file__).resolve().parent / "include")


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'tracekern' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
