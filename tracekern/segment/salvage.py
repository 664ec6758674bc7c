"""Saves what ranks left in shared memory when they died, completes the capture directories, and cleans up."""

from __future__ import annotations

import datetime
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tracekern.dump import format as fmt
from tracekern.dump.attempts import is_attempt_of
from tracekern.dump.reader import is_whole, peek_metadata, run_in
from tracekern.errors import BadInput
from tracekern.files import pinned
from tracekern.formatting import first_of_each
from tracekern.segment.directory_lock import locked
from tracekern.segment.keeper import COLLECT_TIMEOUT_S
from tracekern.segment.manifest import write_manifest
from tracekern.segment.names import SHM_DIR, await_segment, has_owner, list_segments, remove_segment
from tracekern.segment.pack import file_of_capture, write_dump
from tracekern.segment.view import SegmentView
from tracekern.segment.writer import SegmentWriter

_log = logging.getLogger("tracekern")
_DAMAGED = (BadInput, KeyError, TypeError, ValueError)
"""Exceptions that reading a segment may raise if its rank overwrote parts of it before it died."""


@dataclass(frozen=True)
class Leftover:
    """A segment in shared memory: of a rank that died, or of one that still runs."""

    run_id: str
    rank: int
    num_ranks: int
    """How many ranks its run has."""
    ranks: list[int]
    """Ranks of its capture: all of the run, or those of a group."""
    pid: int
    is_running: bool
    """Whether its rank still records, or may."""
    directory: Path
    """Directory of its capture."""
    created: datetime.datetime
    command: str
    """Command line of its ranks."""
    recording: str
    """Name of the `tracekern record` under which they ran; "" for none."""


def find_leftovers(run_id: str = "") -> list[Leftover]:
    """Returns the segments in this machine's shared memory, of one run or of all, ordered by run and rank."""
    found = []
    for name in list_segments(run_id):
        try:
            segment = SegmentView.attach(name)
            metadata, pid = segment.metadata, int(segment.header["pid"])
            segment.close()
            about = str(metadata["run_id"]), int(metadata["rank"]), int(metadata["num_ranks"])
            where, when = Path(metadata["directory"]), datetime.datetime.fromisoformat(metadata["created"])
            texts = (str(metadata.get(key, "")) for key in ("command", "recording"))
            found.append(Leftover(*about, fmt.ranks_of(metadata), pid, has_owner(name), where, when, *texts))
        except (*_DAMAGED, FileNotFoundError):  # another user's, not a capture's, or just removed
            continue
    return sorted(found, key=lambda leftover: (leftover.run_id, leftover.rank))


def salvage_run(
    run_id: str, directory: Path | None = None, killed_by: Mapping[int, str] = MappingProxyType({})
) -> set[int]:
    """Write the missing dumps of a run's captures and their manifests, and remove the run's segments.

    Call it when no rank runs any more. directory: where to write, instead of the directory of each capture; the dumps
    of ranks that closed are copied from there. killed_by: rank -> what killed it, where that is known.
    Returns the ranks that never closed and were saved. A segment whose dump cannot be written, or would replace that of
    another capture, is reported and kept.
    """
    unclosed = set()
    failures = []
    deadline = time.monotonic() + COLLECT_TIMEOUT_S  # the keepers of all dead ranks work at once
    captures: dict[tuple[Path, str], set[Path]] = {}
    for name in list_segments(run_id):
        try:
            segment = SegmentView.attach(name)
        except BadInput as error:
            if (SHM_DIR / name).exists():  # else another process has saved it
                failures.append(f"nothing to save: {error}")
                remove_segment(name)
            continue
        try:
            place = _save(segment, directory, deadline, killed_by)
        except _DAMAGED as error:
            kind = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
            failures.append(f"cannot save {name}: {kind}{error}")
            continue
        if int(segment.header["state"]) != fmt.SegmentState.CLOSED:
            unclosed.add(int(segment.metadata["rank"]))
        if place is not None:
            origins = captures.setdefault((place, str(segment.metadata["run_id"])), set())
            origins.add(Path(segment.metadata["directory"]))
        segment.unlink()
        segment.close()
    for failure in first_of_each(failures):
        _log.warning("%s", failure)
    for (place, name), origins in captures.items():
        with _writing(place, directory, name) as target:
            for origin in origins:
                _bring_closed(origin, target, name)
            write_manifest(target, name)
    return unclosed


def stamp_deaths(run_id: str, died_ns: Mapping[int, int]) -> None:
    """Notes in the segments of ranks that never closed when they died. died_ns: rank -> CLOCK_MONOTONIC."""
    for name in list_segments(run_id):
        with suppress(*_DAMAGED):
            segment = SegmentWriter.attach(name)
            if int(segment.header["state"]) == fmt.SegmentState.OPEN:
                rank = int(segment.metadata["rank"])
                if died_ns.get(rank):  # else a keeper's stamp stays
                    segment.header["died_ns"] = died_ns[rank] + segment.anchor_ns
            segment.close()


def discard_run(run_id: str) -> None:
    """Removes what dead ranks of a run left, without saving it."""
    for name in list_segments(run_id):
        remove_segment(name)


def _save(segment: SegmentView, directory: Path | None, deadline: float, killed_by: Mapping[int, str]) -> Path | None:
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
        _refuse_other_groups(target, metadata["run_id"])
        write_dump(target / file_name, segment, killed_by.get(metadata["rank"], ""))
    return place


def _refuse_other_groups(target: Path, run_id: str) -> None:
    """Raises BadInput for a directory with dumps of other groups of the launch. Their ranks, so names, are others."""
    for other in map(run_in, target.glob("rank_*.tkdump")):
        if other.partition(".")[0] == run_id.partition(".")[0] and fmt.run_name(other) != fmt.run_name(run_id):
            raise BadInput(f"{target}: holds run {other}, of other ranks; choose another directory")


def _bring_closed(origin: Path, target: Path, run_id: str) -> None:
    """Copies what ranks that closed wrote into their capture's directory, unless it is there or replaces another's."""
    with ExitStack() as stack:
        try:
            source = stack.enter_context(pinned(origin))
        except BadInput:  # a link, which only its user may follow
            return
        for path in sorted(source.glob("rank_*.tkdump")):
            copy = target / path.name
            if run_in(path) != run_id or (copy.exists() and (run_in(copy) != run_id or is_whole(copy))):
                continue
            profile = fmt.torch_profile_file_name(peek_metadata(path)["rank"])
            for name in (path.name, profile):
                if (source / name).is_file():
                    with open(source / name, "rb") as original, file_of_capture(target / name) as file:
                        shutil.copyfileobj(original, file)


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
