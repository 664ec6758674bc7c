"""Saves what ranks left in shared memory when they died, completes the capture directories, and cleans up."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from tracekern.dump import format as fmt
from tracekern.dump.attempts import is_attempt_of
from tracekern.dump.reader import is_whole, run_in
from tracekern.errors import BadInput
from tracekern.files import pinned
from tracekern.formatting import first_of_each
from tracekern.segment.directory_lock import locked
from tracekern.segment.keeper import COLLECT_TIMEOUT_S
from tracekern.segment.manifest import write_manifest
from tracekern.segment.names import await_segment, has_owner, list_segments, remove_segment
from tracekern.segment.pack import write_dump
from tracekern.segment.view import SegmentView

_log = logging.getLogger("tracekern")
_DAMAGED = (BadInput, KeyError, TypeError, ValueError)
"""Exceptions that reading a segment may raise if its rank overwrote parts of it before it died."""


@dataclass(frozen=True)
class Leftover:
    """A segment in shared memory: of a rank that died, or of one that still runs."""

    run_id: str
    rank: int
    num_ranks: int
    pid: int
    is_running: bool
    """Whether its rank still records, or may."""
    directory: Path
    """Directory of its capture."""
    created: datetime.datetime
    command: str
    """Command line of its ranks."""


def find_leftovers(run_id: str = "") -> list[Leftover]:
    """Returns the segments in this machine's shared memory, of one run or of all, ordered by run and rank."""
    found = []
    for name in list_segments(run_id):
        try:
            segment = SegmentView.attach(name)
            metadata, pid = segment.metadata, int(segment.header["pid"])
            segment.close()
            about = (str(metadata["run_id"]), int(metadata["rank"]), int(metadata["num_ranks"]))
            where, when = Path(metadata["directory"]), datetime.datetime.fromisoformat(metadata["created"])
            found.append(Leftover(*about, pid, has_owner(name), where, when, str(metadata.get("command", ""))))
        except (*_DAMAGED, FileNotFoundError):  # another user's, not a capture's, or just removed
            continue
    return sorted(found, key=lambda leftover: (leftover.run_id, leftover.rank))


def salvage_run(run_id: str, directory: Path | None = None) -> set[int]:
    """Write the missing dumps of a run's captures and their manifests, and remove the run's segments.

    Call it when no rank runs any more. directory: where to write, instead of the directory of each capture.
    Returns the ranks that never closed and were saved. A segment whose dump cannot be written, or would replace that of
    another capture, is reported and kept.
    """
    unclosed = set()
    failures = []
    deadline = time.monotonic() + COLLECT_TIMEOUT_S  # the keepers of all dead ranks work at once
    captures: set[tuple[Path, str]] = set()
    for name in list_segments(run_id):
        try:
            segment = SegmentView.attach(name)
        except BadInput as error:
            failures.append(f"nothing to save: {error}")
            remove_segment(name)
            continue
        try:
            place = _save(segment, directory, deadline)
        except _DAMAGED as error:
            kind = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
            failures.append(f"cannot save {name}: {kind}{error}")
            continue
        if int(segment.header["state"]) != fmt.SegmentState.CLOSED:
            unclosed.add(int(segment.metadata["rank"]))
        if place is not None:
            captures.add((place, str(segment.metadata["run_id"])))
        segment.unlink()
        segment.close()
    for failure in first_of_each(failures):
        _log.warning("%s", failure)
    for place, name in captures:
        with _writing(place, directory, name) as target:
            write_manifest(target, name)
    return unclosed


def discard_run(run_id: str) -> None:
    """Removes what dead ranks of a run left, without saving it."""
    for name in list_segments(run_id):
        remove_segment(name)


def _save(segment: SegmentView, directory: Path | None, deadline: float) -> Path | None:
    """Writes the segment's dump unless it exists. Returns the directory that holds it.

    Returns None if the dump was written before and a later capture of the same program replaced it. Raises BadInput if
    the dump cannot be written. deadline: for the segment's keeper, in time.monotonic().
    """
    metadata = segment.metadata
    file_name, own = fmt.dump_file_name(metadata["rank"]), Path(metadata["directory"])
    if directory is not None and is_attempt_of(directory, own):
        directory = None
    for place in (own, directory or own):
        if _holds(place, directory, file_name, metadata["run_id"]):
            return place
    if not await_segment(segment.name, deadline - time.monotonic()):
        _log.warning("segment %s: its keeper does not end; saved without what the device holds", segment.name)
    place = directory or own
    with _writing(place, directory, metadata["run_id"]) as target:
        found = run_in(target / file_name)
        other = found if found != metadata["run_id"] else ""
        if other and segment.header["saved"]:
            return None
        if other:
            raise BadInput(f"{target / file_name}: holds run {other}, captured there since; choose another directory")
        write_dump(target / file_name, segment)
    return place


def _holds(place: Path, of_user: Path | None, file_name: str, run_id: str) -> bool:
    """Returns whether a directory has the whole dump of a run already."""
    with suppress(BadInput):  # no directory; what is to be written there says so
        if place.is_dir():
            with _opened(place, of_user) as target:
                return run_in(target / file_name) == run_id and is_whole(target / file_name)
    return False


@contextmanager
def _writing(place: Path, of_user: Path | None, run_id: str) -> Iterator[Path]:
    """Opens a capture's directory, made if it is missing, and holds its lock for the run."""
    with _opened(place, of_user) as target, locked(target, run_id):
        yield target


def _opened(place: Path, of_user: Path | None) -> AbstractContextManager[Path]:
    """Opens a capture's directory. Links in a path are followed only if the user named it, not if a segment did."""
    return nullcontext(place) if place == of_user else pinned(place)
