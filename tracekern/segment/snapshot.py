"""Copies what the ranks of a run have recorded so far, while they run on: shows who waits for whom in a hung job."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

from tracekern.dump import format as fmt
from tracekern.dump.reader import run_in
from tracekern.errors import BadInput
from tracekern.segment.directory_lock import locked
from tracekern.segment.keeper import COLLECT_TIMEOUT_S, ask_keeper
from tracekern.segment.manifest import write_manifest
from tracekern.segment.names import await_segment, has_owner
from tracekern.segment.pack import is_of_launch, write_dump
from tracekern.segment.salvage import find_leftovers
from tracekern.segment.view import SegmentView
from tracekern.segment.writer import SegmentWriter

_TRIES = 4


def snapshot_run(run_id: str, directory: Path) -> list[int]:
    """Write a dump of each rank's current records, and their manifest. Returns the ranks, which run on undisturbed.

    For a rank that has died, writes what it left, which remains to be salvaged. Rank by rank, a second copy of the
    records takes memory. Raises BadInput if there are none, and if the directory belongs to another capture or cannot
    be written.
    """
    found = [leftover for leftover in find_leftovers(run_id) if leftover.run_id == run_id]
    segments = [SegmentView.attach(fmt.segment_name(run_id, leftover.rank)) for leftover in found]
    if not segments:
        raise BadInput(
            f"run {run_id}: nothing of it is in this machine's shared memory; it has closed, or never opened"
        )
    try:
        for segment in segments:
            _check_place(segment, directory)
        with locked(directory, run_id):
            for segment in segments:
                with contextlib.closing(copy_as_it_stands(segment)) as copy:
                    write_dump(directory / fmt.dump_file_name(segment.metadata["rank"]), copy)
            return write_manifest(directory, run_id)
    finally:
        for segment in segments:
            segment.close()


def copy_as_it_stands(segment: SegmentView) -> SegmentWriter:
    """Returns a private copy of a segment, with all launches that hold a region now.

    The rank runs on meanwhile; a host span marks when the copy began. A region that the rank gives to a later launch
    while it is copied is copied again; after a few tries that launch is left out.
    """
    began_ns = time.monotonic_ns() + segment.anchor_ns
    runs = _runs(segment)
    reads_device = False
    if not runs:
        await_segment(segment.name, COLLECT_TIMEOUT_S)
    elif _has_device_records(segment):
        reads_device = ask_keeper(segment.name)
    copy = SegmentWriter.empty_like(segment)
    copy.copy_from(segment, 0, fmt.SEGMENT_HEADER.itemsize)  # counts first: what they count is complete by then
    header = copy.header
    copy.copy_from(segment, int(header["metadata_offset"]), int(header["metadata_bytes"]))
    copy.copy_from(segment, int(header["fault_offset"]), segment.fault_record.nbytes)
    for rows, offset in (
        (copy.clock_samples(), header["samples_offset"]),
        (copy.host_spans(), header["host_offset"]),
    ):
        copy.copy_from(segment, int(offset), rows.nbytes)
    for launch_idx in range(int(header["num_launches"])):
        _copy_launch(segment, copy, launch_idx)
    if runs and header["state"] == fmt.SegmentState.OPEN:
        header["state"] = fmt.SegmentState.RUNNING
        header["collected"] = reads_device
        copy.append_host_span("snapshot", threading.get_native_id(), began_ns, began_ns)
    return copy


def _runs(segment: SegmentView) -> bool:
    """Returns whether the segment's rank still records; a rank that closed meanwhile has removed the name."""
    try:
        return has_owner(segment.name)
    except FileNotFoundError:
        return False


def _copy_launch(segment: SegmentView, copy: SegmentWriter, launch_idx: int) -> None:
    theirs, ours = segment.launches()[launch_idx], copy.launches()[launch_idx : launch_idx + 1]
    for _ in range(_TRIES):
        ours[0] = theirs
        entry = ours[0]
        flags = int(entry["flags"])
        if flags & fmt.ENTRY_RESERVED and not flags & fmt.ENTRY_IN_GRAPH:
            return
        first = int(entry["headers_offset"]) - fmt.LAUNCH_DESCRIPTOR.itemsize
        stop = int(entry["records_offset"]) + segment.records(entry).nbytes
        for offset, num_bytes in (
            (first, stop - first),
            (int(entry["events_offset"]), int(entry["events_bytes"])),
            (int(entry["roles_offset"]), int(entry["roles_bytes"])),
        ):
            copy.copy_from(segment, offset, num_bytes)
        if theirs.tobytes() == entry.tobytes():
            # The keeper copied the region earlier; since then another launch may have taken it.
            if flags & fmt.ENTRY_MIRRORED and not is_of_launch(entry, copy.track_headers(entry)).any():
                break
            return
    ours["flags"] |= fmt.ENTRY_RESERVED


def _has_device_records(segment: SegmentView) -> bool:
    return bool((segment.launches()["flags"] & fmt.ENTRY_MIRRORED).any())


def _check_place(segment: SegmentView, directory: Path) -> None:
    metadata = segment.metadata
    if directory.resolve() == Path(metadata["directory"]).resolve():
        raise BadInput(f"{directory}: the run itself writes its capture there; choose another directory")
    other = run_in(directory / fmt.dump_file_name(metadata["rank"]))
    if other not in ("", metadata["run_id"]):
        raise BadInput(f"{directory}: holds run {other}; choose another directory")
