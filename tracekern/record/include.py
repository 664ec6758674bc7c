"""Where the headers for users' own kernels are."""

from __future__ import annotations

from pathlib import Path


def include_path() -> str:
    """Directory to pass to the compiler with -I; then `#include <tracekern.h>`."""
    return str(Path(__file__).resolve().parent.parent / "include")
