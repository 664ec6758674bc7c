"""Saves what ranks left in shared memory when they died, completes the capture directories, and cleans up."""

from __future__ import annotations

import logging
from pathlib import Path

from tracekern.errors import BadInput
from tracekern.record import format as fmt
from tracekern.record.dump import peek_metadata
from tracekern.record.keeper import COLLECT_TIMEOUT_S
from tracekern.record.manifest import write_manifest
from tracekern.record.pack import write_dump
from tracekern.record.segment import Segment
from tracekern.record.segment_names import await_segment, list_segments, remove_segment

_log = logging.getLogger("tracekern")


def salvage_run(run_id: str, directory: Path | None = None) -> set[int]:
    """Write the dumps that are missing from the captures of a run, their manifests, and remove the run's segments.

    To be called when no rank runs any more. directory: where to, instead of the directory each capture was opened with.
    Returns the ranks that never closed. A segment whose dump cannot be written is told and kept.
    """
    unclosed = set()
    captures: set[tuple[Path, str]] = set()
    for name in list_segments(run_id):
        try:
            segment = Segment.attach(name)
        except BadInput as error:
            _log.warning("nothing to save: %s", error)
            remove_segment(name)
            continue
        try:
            metadata = segment.metadata
            target = directory or Path(metadata["directory"])
            if int(segment.header["state"]) != fmt.SegmentState.CLOSED:
                unclosed.add(int(metadata["rank"]))
            path = target / fmt.dump_file_name(metadata["rank"])
            if not _holds(path, metadata["run_id"]):
                if not await_segment(name, COLLECT_TIMEOUT_S):
                    _log.warning("segment %s: its keeper does not end; saved without what the device holds", name)
                write_dump(path, segment)
        except BadInput as error:
            _log.warning("cannot save %s: %s", name, error)
            continue
        captures.add((target, metadata["run_id"]))
        segment.unlink()
        segment.close()
    for target, name in captures:
        write_manifest(target, name)
    return unclosed


def _holds(path: Path, run_id: str) -> bool:
    """Whether the dump of this run is already there."""
    try:
        return bool(peek_metadata(path)["run_id"] == run_id)
    except BadInput:
        return False
