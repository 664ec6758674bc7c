"""A launch in a capture, with an event table of its own."""

from __future__ import annotations

import json

from tests.captures import EVENT_TABLE, ROLES
from tests.kernels import run_kernel

TABLE = json.dumps(EVENT_TABLE)


def launch(session, name: str = "demo", grid: int = 2, warps: int = 2, spans: int = 3):
    launched = session.launch(name, grid=grid, warps=warps, events=TABLE, roles=ROLES, epoch=1)
    if launched.traced:
        run_kernel(launched.descriptor, grid, warps, spans)
    return launched
