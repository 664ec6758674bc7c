"""How many cores a process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Returns how many cores this process may run on; where the system does not say, how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
