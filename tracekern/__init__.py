"""tracekern: what happens inside GPU kernels, on every rank, on one timeline.

Importing this package pulls in neither torch nor the compiled part; public names load what they need on first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekern.analysis.findings import analyze
    from tracekern.comm.communicator import Communicator
    from tracekern.comm.ranks.group import Group
    from tracekern.errors import BadInput, CallBroken, CommTimeout, DeviceLost, TracekernError
    from tracekern.export.write import save
    from tracekern.launcher.launch import launch_ranks
    from tracekern.record.from_outside import launch, start, stop
    from tracekern.record.host_range import range  # noqa: A004
    from tracekern.record.session import capture
    from tracekern.timeline.load import load

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "CallBroken",
    "CommTimeout",
    "Communicator",
    "DeviceLost",
    "Group",
    "TracekernError",
    "analyze",
    "capture",
    "include_path",
    "launch",
    "launch_ranks",
    "load",
    "range",
    "save",
    "start",
    "stop",
]

_ERRORS = "tracekern.errors"
_LOADED_ON_USE = {
    "analyze": "tracekern.analysis.findings",
    "capture": "tracekern.record.session",
    "Communicator": "tracekern.comm.communicator",
    "Group": "tracekern.comm.ranks.group",
    "launch_ranks": "tracekern.launcher.launch",
    "load": "tracekern.timeline.load",
    "range": "tracekern.record.host_range",
    "save": "tracekern.export.write",
    **dict.fromkeys(("launch", "start", "stop"), "tracekern.record.from_outside"),
    **dict.fromkeys(("BadInput", "CallBroken", "CommTimeout", "DeviceLost", "TracekernError"), _ERRORS),
}


def include_path() -> str:
    """Returns the directory of tracekern.h, to be passed to the compiler with -I."""
    return str(Path(__file__).resolve().parent / "include")


def __getattr__(name: str) -> Any:
    if name in _LOADED_ON_USE:
        value = getattr(importlib.import_module(_LOADED_ON_USE[name]), name)
        globals()[name] = value  # the next use does not come here
        return value
    raise AttributeError(f"module 'tracekern' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
