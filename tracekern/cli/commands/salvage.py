"""`tracekern salvage`: saves what ranks left in shared memory when they died."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekern.cli import options
from tracekern.cli.output import console, note, print_json, suggest, working
from tracekern.errors import BadInput, NotBuilt
from tracekern.formatting import ago, count, ranks

if TYPE_CHECKING:
    from tracekern.segment.salvage import Leftover

_MOST_NAMED = 3
"""Runs that a run names before it starts."""


def salvage(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run to save; without it, lists what is left.")] = "",
    directory: Annotated[
        Path | None, options.output_option("DIR", "Directory to write, instead of the capture's.")
    ] = None,
    discard: Annotated[bool, typer.Option("--discard", help="Remove what is left of RUN without saving it.")] = False,
    as_json: options.Json = False,
) -> None:
    """Save what killed ranks recorded, if tracekern's launcher did not. Without RUN: list what is left."""
    from tracekern.segment.salvage import discard_run, find_leftovers

    given = f"-o {directory}" if directory else "--discard"
    if (directory or discard) and not run_id:
        raise BadInput(f"{given}: name the run that it is for; `{suggest('salvage')}` lists them")
    if directory and discard:
        raise BadInput(f"{given}: saves what --discard removes; give one of them")
    leftovers = find_leftovers(run_id)
    if not run_id:
        _show(leftovers, as_json)
        return
    dead = _dead_ranks(run_id, leftovers)
    if discard:
        discard_run(run_id)
        _tell(run_id, f"removed what {ranks(dead)} left", [], {}, as_json)
    else:
        _save(run_id, leftovers, dead, directory, as_json)


@contextlib.contextmanager
def naming_the_rest(captures: list[Path]) -> Iterator[None]:
    """Names what captures that the block reads lack and shared memory has: in a note, or in the block's BadInput."""
    try:
        yield
    except BadInput as error:
        raise BadInput("; ".join([str(error), *_rest_of(captures)])) from None
    for line in _rest_of(captures):
        note(line)


def _rest_of(captures: list[Path]) -> list[str]:
    """Returns a line a run whose ranks left records for these directories, or still record for them."""
    from tracekern.dump.format import dump_file_name
    from tracekern.dump.reader import is_whole, run_in

    try:
        from tracekern.segment.salvage import find_leftovers
    except NotBuilt:  # nor did any rank record here
        return []
    directories = {(path if path.is_dir() else path.parent).resolve() for path in captures}
    found: dict[str, list[Leftover]] = {}
    for leftover in find_leftovers():
        dump = leftover.directory / dump_file_name(leftover.rank)
        if leftover.directory.resolve() in directories and not (run_in(dump) == leftover.run_id and is_whole(dump)):
            found.setdefault(leftover.run_id, []).append(leftover)
    lines = []
    for run_id, of_run in found.items():
        get = f"save them: {suggest('salvage', run_id)}"
        if any(leftover.is_running for leftover in of_run):
            get = f"see what there is by now: {suggest('snapshot', run_id)}"
        whose = ranks([leftover.rank for leftover in of_run])
        lines.append(f"records of {whose} of run {run_id} are in shared memory, not here; {get}")
    return lines


def note_dead_runs() -> None:
    """Names the runs that left something in shared memory, and what saves it."""
    from tracekern.segment.names import find_dead

    runs = list(find_dead().items())
    for run_id, dead in runs[:_MOST_NAMED]:
        note(f"{ranks(dead)} of run {run_id} left records in shared memory; {_save_or_remove(run_id)}")
    if (more := len(runs) - _MOST_NAMED) > 0:
        note(f"so did those of {count(more, 'older run')}: {suggest('salvage')}")


def _save_or_remove(run_id: str) -> str:
    return f"save them: {suggest('salvage', run_id)}; or, with --discard, remove them"


def _dead_ranks(run_id: str, leftovers: list[Leftover]) -> list[int]:
    """Returns the ranks that left something. Raises BadInput if there are none, or some that run."""
    from tracekern.segment.names import find_dead, list_segments

    for leftover in leftovers:
        if leftover.is_running:
            who = f"run {run_id}: rank {leftover.rank} (pid {leftover.pid}) still runs"
            raise BadInput(f"{who}; end it first, or see what it does: {suggest('snapshot', run_id)}")
    if dead := sorted({rank for of_run in find_dead(run_id).values() for rank in of_run}):
        return dead
    if list_segments(run_id, of_anybody=True):
        raise BadInput(f"run {run_id}: what is left of it cannot be read; salvage it as the user it belongs to")
    raise BadInput(f"run {run_id}: nothing of it is left on this machine; `{suggest('salvage')}` lists what is")


def _save(run_id: str, leftovers: list[Leftover], dead: list[int], directory: Path | None, as_json: bool) -> None:
    from tracekern.segment.salvage import find_leftovers, salvage_run

    with working("packing what is left"):
        salvage_run(run_id, directory)
    for leftover in find_leftovers(run_id):
        raise BadInput(f"run {run_id}: rank {leftover.rank} could not be saved and is still there; try another -o DIR")
    if not leftovers:
        _tell(run_id, f"{ranks(dead)} ended before recording anything; removed", [], {}, as_json)
        return
    members: dict[Path, set[int]] = {}
    for leftover in leftovers:  # groups of the run's ranks may have captured into a directory each
        members.setdefault(_place(leftover, directory), set()).update(leftover.ranks)
    saved = sorted({leftover.rank for leftover in leftovers})
    what = f"saved {ranks(saved)} of {len(set().union(*members.values()))}"
    is_part = {place: len(list(place.glob("rank_*.tkdump"))) < len(of_place) for place, of_place in members.items()}
    _tell(run_id, what, saved, is_part, as_json)


def _place(saved: Leftover, directory: Path | None) -> Path:
    """Returns where a rank's dump is: in its own directory also if the rank had written it there before it died."""
    from tracekern.dump.format import dump_file_name
    from tracekern.dump.reader import run_in

    is_there = directory and run_in(directory / dump_file_name(saved.rank)) == saved.run_id
    return directory if directory and is_there else saved.directory


def _tell(run_id: str, what: str, saved: list[int], is_part: dict[Path, bool], as_json: bool) -> None:
    """is_part: of each directory where something was saved, whether dumps of its capture are missing there."""
    targets = sorted(is_part)
    if as_json:
        print_json({"run_id": run_id, "ranks": saved, "captures": list(map(str, targets))})
        return
    console().print(f"run {run_id}: {what}")
    note_only_counted(targets)
    for target in targets:
        note(f"who waited for whom: {suggest('report', target, *['--partial'] * is_part[target])}")


def note_only_counted(directories: list[Path]) -> None:
    """Explains captures without records if a rank was still counting; one rank's line covers all."""
    from tracekern.dump.reader import peek_metadata

    dumps = [path for directory in directories for path in sorted(directory.glob("rank_*.tkdump"))]
    if why := next(filter(None, (peek_metadata(path).get("counted_text") for path in dumps)), ""):
        note(why)


def _show(leftovers: list[Leftover], as_json: bool) -> None:
    from tracekern.dump.format import run_name
    from tracekern.segment.names import find_dead

    if as_json:
        rows = [{**vars(one), "directory": str(one.directory), "created": one.created.isoformat()} for one in leftovers]
        print_json({"leftovers": rows})
        return
    runs = {one.run_id: [other for other in leftovers if other.run_id == one.run_id] for one in leftovers}
    for run_id, of_run in runs.items():
        console().print(f"{run_id}: {_about(of_run)}", soft_wrap=True)
    readable = set(map(run_name, runs))
    unread = {run_id: dead for run_id, dead in find_dead().items() if run_id not in readable}
    for run_id, dead in unread.items():
        console().print(f"{run_id}: {ranks(dead)} ended before recording anything")
        note(f"remove it: {suggest('salvage', run_id)}")
    if not leftovers and not unread:
        console().print("nothing is left on this machine")
    for run_id, of_run in runs.items():
        if any(leftover.is_running for leftover in of_run):
            note(f"see what it does: {suggest('snapshot', run_id)}")
        else:
            note(f"save it: {suggest('salvage', run_id)}")


def _about(of_run: list[Leftover]) -> str:
    """Returns one line: which ranks are there, since when, where their capture goes and what they run."""
    first, who = of_run[0], list[str]()
    for is_running, one, several in ((False, "records", "record"), (True, "still records", "still record")):
        numbers = [leftover.rank for leftover in of_run if leftover.is_running is is_running]
        if numbers:
            of_all = "" if who else f" of {len(first.ranks)}"
            verb = one if len(numbers) == 1 else several
            who.append(f"{ranks(numbers)}{of_all} {verb}{'' if is_running else ' no more'}")
    age = datetime.datetime.now(datetime.timezone.utc) - first.created.astimezone()
    command = f"; {first.command}" if first.command else ""
    return f"{', '.join(who)}; opened {ago(age.total_seconds())} for {first.directory}{command}"
