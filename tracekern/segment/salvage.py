"""Saves what ranks left in shared memory when they died, completes the capture directories, and cleans up."""

from __future__ import annotations

import datetime
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from tracekern.dump import format as fmt
from tracekern.dump.reader import is_whole, run_in
from tracekern.errors import BadInput
from tracekern.segment.keeper import COLLECT_TIMEOUT_S
from tracekern.segment.manifest import write_manifest
from tracekern.segment.names import await_segment, has_owner, list_segments, remove_segment
from tracekern.segment.pack import write_dump
from tracekern.segment.view import SegmentView

_log = logging.getLogger("tracekern")
_DAMAGED = (BadInput, KeyError, TypeError, ValueError)
"""What reading a segment may raise into which its rank wrote before it died, what does not belong there."""


@dataclass(frozen=True)
class Leftover:
    """A segment in shared memory: of a rank that died, or of one that still runs."""

    run_id: str
    rank: int
    num_ranks: int
    pid: int
    is_running: bool
    """It still records, or may."""
    directory: Path
    """Of its capture."""
    created: datetime.datetime
    command: str
    """What its ranks run."""


def find_leftovers(run_id: str = "") -> list[Leftover]:
    """What stands in this machine's shared memory, of one run or of all, by run and rank."""
    found = []
    for name in list_segments(run_id):
        try:
            segment = SegmentView.attach(name)
            metadata, pid = segment.metadata, int(segment.header["pid"])
            segment.close()
            about = (str(metadata["run_id"]), int(metadata["rank"]), int(metadata["num_ranks"]))
            where, when = Path(metadata["directory"]), datetime.datetime.fromisoformat(metadata["created"])
            found.append(Leftover(*about, pid, has_owner(name), where, when, str(metadata.get("command", ""))))
        except (*_DAMAGED, FileNotFoundError):  # another user's, none of a capture, or just removed
            continue
    return sorted(found, key=lambda leftover: (leftover.run_id, leftover.rank))


def salvage_run(run_id: str, directory: Path | None = None) -> set[int]:
    """Write the dumps that are missing from the captures of a run, their manifests, and remove the run's segments.

    To be called when no rank runs any more. directory: where to, instead of the directory each capture was opened with.
    Returns the ranks that never closed and were saved. A segment whose dump cannot be written, or would take the place
    of another capture's, is reported and kept.
    """
    unclosed = set()
    deadline = time.monotonic() + COLLECT_TIMEOUT_S  # the keepers of all dead ranks work at once
    captures: set[tuple[Path, str]] = set()
    for name in list_segments(run_id):
        try:
            segment = SegmentView.attach(name)
        except BadInput as error:
            _log.warning("nothing to save: %s", error)
            remove_segment(name)
            continue
        try:
            place = _save(segment, directory, deadline)
        except _DAMAGED as error:
            kind = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
            _log.warning("cannot save %s: %s%s", name, kind, error)
            continue
        if int(segment.header["state"]) != fmt.SegmentState.CLOSED:
            unclosed.add(int(segment.metadata["rank"]))
        if place is not None:
            captures.add((place, str(segment.metadata["run_id"])))
        segment.unlink()
        segment.close()
    for place, name in captures:
        write_manifest(place, name)
    return unclosed


def _save(segment: SegmentView, directory: Path | None, deadline: float) -> Path | None:
    """The directory that holds the dump of the segment, now at the latest. Raises BadInput where it cannot be written.

    None where it was there, until the same program captured into that directory again.
    deadline: of time.monotonic(), for its keeper.
    """
    metadata = segment.metadata
    file_name, own = fmt.dump_file_name(metadata["rank"]), Path(metadata["directory"])
    target = directory or own
    for place in (own, target):
        if run_in(place / file_name) == metadata["run_id"] and is_whole(place / file_name):
            return place
    if not await_segment(segment.name, deadline - time.monotonic()):
        _log.warning("segment %s: its keeper does not end; saved without what the device holds", segment.name)
    found = run_in(target / file_name)
    other = found if found != metadata["run_id"] else ""
    if other and segment.header["saved"]:
        return None
    if other:
        raise BadInput(f"{target / file_name}: holds run {other}, captured there since; choose another directory")
    write_dump(target / file_name, segment)
    return target
