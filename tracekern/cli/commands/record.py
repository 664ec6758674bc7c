"""`tracekern record`: runs a program whose kernels ask for their launches by tracekern.launch(), and captures them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekern.cli import options
from tracekern.cli.commands.open_trace import open_trace
from tracekern.cli.output import note, quoted, show_it, suggest, working
from tracekern.errors import BadInput
from tracekern.formatting import count, ranks, signal_name

if TYPE_CHECKING:
    from tracekern.segment.salvage import Leftover

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def record(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The program and its arguments.")],
    output: Annotated[Path, options.output_option("DIR", "Directory for the capture.")],
    records_per_track: Annotated[str, typer.Option(help="Room of a track; auto: 1,024 records.")] = "auto",
    keep: Annotated[str, typer.Option(help="Which records of a full track stay: first or last.")] = "first",
    every: Annotated[int, typer.Option(help="Record every Nth launch of a kernel.")] = 1,
    is_opened: Annotated[bool, typer.Option("--open", help="Show the capture in ui.perfetto.dev at the end.")] = False,
) -> None:
    """Run a program and capture what its kernels ask for by tracekern.launch(), on all its ranks; say who waited.

    Ends with the exit code of the program, or with 1 where that is 0 and what was recorded could not be saved.
    """
    from tracekern.segment.evidence import keeping
    from tracekern.segment.salvage import find_leftovers

    chosen: dict[str, Any] = {
        "records_per_track": options.parse_records(records_per_track),
        "keep": keep,
        "every": every,
    }
    _check(output, chosen)
    directory = output.absolute()
    older = {leftover.run_id for leftover in find_leftovers()}
    recording = secrets.token_hex(8)
    env = {"TRACEKERN_CAPTURE": str(directory), "TRACEKERN_CAPTURE_OPTIONS": json.dumps(chosen)}
    env |= {"TRACEKERN_RECORDING": recording}
    with keeping(recording):
        program = _run(command, env)
        rest = [leftover for leftover in find_leftovers() if leftover.run_id not in older]
        is_left = _save_rest(directory, rest, program)
    places = _tell(output, recording, {leftover.run_id for leftover in rest})
    if not places and not is_left:
        note(f"{directory}: nothing was recorded: the program never called tracekern.launch(), or its log says why not")
    if places and is_opened:
        open_trace(places[-1])
    code = program.returncode
    raise typer.Exit((code if code >= 0 else 128 - code) or int(is_left))


def _check(output: Path, chosen: dict[str, Any]) -> None:
    """Raises BadInput for what no capture can have. In the program it would only be a line of its log."""
    from tracekern.record.selection import Selection

    Selection(**chosen)
    there = next(place for place in (output.absolute(), *output.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        is_fixed = bool(os.statvfs(there).f_flag & os.ST_RDONLY)
        why = "is a file" if not there.is_dir() else "lies on a read-only file system" if is_fixed else "is not yours"
        raise BadInput(f"{output}: cannot be written, {there} {why}; choose another directory")


def _run(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Returns the program, which has ended. Ctrl-C reaches it by itself, as it shares the terminal."""
    try:
        program = subprocess.Popen(command, env=os.environ | env)
    except OSError as error:
        raise BadInput(f"record: cannot run {quoted(*command)}: {error.strerror}") from None
    with _signals_passed_on(program):
        program.wait()
    return program


@contextlib.contextmanager
def _signals_passed_on(program: subprocess.Popen[bytes]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda number, _: program.send_signal(number)) for number in _PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, _: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _save_rest(directory: Path, leftovers: list[Leftover], program: subprocess.Popen[bytes]) -> bool:
    """Saves what ranks left in shared memory that were killed, or had no room. Returns whether some of it stays."""
    from tracekern.dump.attempts import is_attempt_of
    from tracekern.segment.salvage import find_leftovers, salvage_run

    place = directory.resolve()
    runs: dict[str, list[Leftover]] = {}
    for leftover in leftovers:
        if leftover.directory == place or is_attempt_of(place, leftover.directory):
            runs.setdefault(leftover.run_id, []).append(leftover)
    is_left = False
    for run_id, of_run in runs.items():
        if any(leftover.is_running for leftover in of_run):
            so_far = f"what they recorded so far: {suggest('snapshot', run_id)}"
            note(f"{ranks([leftover.rank for leftover in of_run])} of run {run_id} still run; {so_far}")
            continue
        killed_by = {one.rank: signal_name(program.returncode) for one in of_run if one.pid == program.pid}
        if saved := salvage_run(run_id, killed_by=killed_by):
            note(f"{ranks(sorted(saved))} ended without closing the capture: saved from shared memory")
        if left := [leftover.rank for leftover in find_leftovers(run_id)]:
            is_left = True
            note(f"{ranks(left)}: not saved, and still in shared memory: {suggest('salvage', run_id, '-o', 'DIR')}")
    return is_left


def _tell(directory: Path, recording: str, saved: Container[str]) -> list[Path]:
    """Names what this recording captured, reports it, and names the commands that show it. Returns where it is.

    saved: runs of it that ranks left in shared memory.
    """
    from tracekern.dump.attempts import metadata_of, places_in
    from tracekern.dump.format import ranks_of

    places = []
    for _, place in places_in(directory):  # a fault, a restart or another program of the recording makes attempts
        found = [dump for dump in metadata_of(place) if dump.get("recording") == recording or dump["run_id"] in saved]
        if found:
            places.append(place)
            num_launches = sum(len(metadata["launches"]) for metadata in found)
            note(f"{count(num_launches, 'launch')} of {ranks([metadata['rank'] for metadata in found])} -> {place}")
            is_partial = len(found) < len(ranks_of(found[0]))
            _report(place, is_partial)
            note(f"more of it: {suggest('report', place, *['--partial'] * is_partial)}   {show_it(place)}")
    return places


def _report(place: Path, is_partial: bool) -> None:
    """Prints the lines that a report begins with, on stderr: stdout is the program's."""
    from tracekern.analysis.findings import analyze
    from tracekern.timeline.load import load
    from tracekern.viewers.report.headlines import headlines

    try:
        with working("reading and analysing the capture"):
            lines = headlines(analyze(load(place, partial=is_partial)))
    except BadInput as error:
        note(str(error))
        return
    width = max(len(line.word) for line in lines)
    for line in lines:
        note(f"{line.word:>{width}}  {line.text}")
