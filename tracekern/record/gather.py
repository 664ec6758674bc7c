"""Collects the dumps of all ranks when a capture closes, with or without a shared disk, with peers alive or dead."""

from __future__ import annotations

import gzip
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekern.comm.ranks.group import Group
from tracekern.dump import format as fmt
from tracekern.dump.torch_profile import read_profile
from tracekern.errors import BadInput, PeerLost
from tracekern.files import scratch_directory
from tracekern.formatting import count
from tracekern.segment.manifest import write_manifest
from tracekern.segment.pack import file_of_capture, pack, write_dump
from tracekern.segment.view import SegmentView

if TYPE_CHECKING:
    from tracekern.comm.devices.device import CaptureDevice
    from tracekern.record.graphs import TracedGraph
    from tracekern.segment.writer import SegmentWriter

_DISORDER_TIMEOUT_S = 5.0
"""How long a rank that leaves with an error waits for the others before it writes the manifest."""

_log = logging.getLogger("tracekern")


def collect_records(
    device: CaptureDevice, segment: SegmentWriter, graphs: Sequence[TracedGraph], is_idle: bool, directory: Path
) -> None:
    """Copies the records back from device memory. Warns of records lost with a device that does not answer."""
    try:
        for graph in graphs:
            graph.close(is_idle)
    except RuntimeError as error:
        _log.warning("capture %s: the last replay of a graph was not counted: %s", directory, error)
    try:
        device.memory.collect(segment)
    except RuntimeError as error:
        lost = [entry for entry in segment.recorded_launches() if entry["flags"] & fmt.ENTRY_MIRRORED]
        if lost:
            what = f"the device does not answer: {error}; lost with its memory: {count(len(lost), 'launch')}"
            _log.warning("capture %s: %s", directory, what)


def leave_dump(
    group: Group, segment: SegmentView, directory: Path, one_disk: bool, in_order: bool, is_gone: bool
) -> None:
    """Write or send this rank's dump; the first rank of the group writes the manifest last.

    is_gone: the program has destroyed the process group, so that no rank knows which of them is the last.

    The dump is saved before this rank waits for a peer. Ranks known from the environment alone cannot exchange
    messages: only their launcher can write the manifest.
    Raises BadInput if the directory cannot hold the dump, after reporting it to the peers, which would wait otherwise.
    """
    problem = ""
    if one_disk or not group.is_connected or group.rank == 0:
        problem = _write(directory, segment)
    if one_disk and group.is_connected:
        _meet(group, segment, problem, in_order)
    elif group.is_connected and group.rank == 0:
        for place in range(1, group.num_ranks):
            _receive(group, place, directory)
    elif group.is_connected:
        _send(group, segment, directory)
    if problem:
        raise BadInput(problem)
    if is_gone and not one_disk:
        told = "capture %s: its process group was destroyed in the block: this rank's dump stays on this node, %s"
        _log.warning(told, directory, segment.metadata["node"])
    if is_gone:
        _list_together(directory, str(segment.metadata["run_id"]))
    elif group.is_connected and group.rank == 0:
        write_manifest(directory, str(segment.metadata["run_id"]))


def _list_together(directory: Path, run_id: str) -> None:
    """Writes the manifest, as all ranks do, each behind its dump. Who writes it last finds all dumps."""
    listed: list[Path] = []
    while listed != (found := sorted(directory.glob("rank_*.tkdump"))):
        write_manifest(directory, run_id)
        listed = found


def how_to_save(run_id: str) -> str:
    """Returns the advice that ends an error or warning about a capture that could not be written."""
    return f"what was recorded stays in shared memory: `tracekern salvage {run_id} -o DIR` saves it"


def _write(directory: Path, segment: SegmentView) -> str:
    """Writes this rank's dump. Returns the reason if it could not be written, else ""."""
    try:
        write_dump(directory / fmt.dump_file_name(segment.metadata["rank"]), segment)
    except BadInput as error:
        return str(error)
    return ""


def _meet(group: Group, segment: SegmentView, problem: str, in_order: bool) -> None:
    """Waits until all ranks have tried to write their dumps; the first one logs those that failed."""
    is_launched = os.environ.get("TRACEKERN_KEEP_SEGMENT") == "1"  # tracekern's launcher says who died or failed
    try:
        group.barrier() if in_order else group.barrier(_DISORDER_TIMEOUT_S)
        problems = group.all_gather(problem, "the end of a capture")
        # A rank that leaves closes its connections; another rank may still be reading from them.
        group.barrier(_DISORDER_TIMEOUT_S)
    except PeerLost as error:
        left = "`tracekern salvage` packs what a dead rank left"
        told = "capture %s: not all ranks closed (%s); %s"
        _log.log(logging.INFO if is_launched else logging.WARNING, told, segment.metadata["directory"], error, left)
        return
    if group.rank == 0 and not is_launched:
        for rank, text in zip(group.world_ranks, problems, strict=True):
            if text and rank != group.world_rank:  # which raises its own
                how = how_to_save(segment.metadata["run_id"])
                _log.warning("rank %d could not write its dump: %s; %s", rank, text, how)


def save_torch_profile(profile: Any, path: Path, group: Group) -> Path:
    """Write the Chrome trace of a torch.profiler run, or of the file it was exported to, gzipped, to `path`.

    Raises BadInput if it is not a Chrome trace, or of another rank: every reader would reject the whole capture.
    """
    with scratch_directory() as scratch:
        source = scratch / "torch.json"
        if isinstance(profile, str | Path):
            source = Path(profile)
        else:
            profile.export_chrome_trace(str(source))
        told = source if isinstance(profile, str | Path) else "add_torch_profile(): what the profiler exported"
        read_profile(source, group.world_rank, group.num_world_ranks, told)
        data = source.read_bytes()
    with file_of_capture(path) as file:
        file.write(data if data[:2] == b"\x1f\x8b" else gzip.compress(data, 3))
    return path


def _receive(group: Group, place: int, directory: Path) -> None:
    """Receives a rank's dump, writes it to this disk, and answers whether it was written. place: the rank's number."""
    rank, chunks = group.world_ranks[place], group.receive_bytes(place)
    try:
        try:
            with file_of_capture(directory / fmt.dump_file_name(rank)) as file:
                for chunk in chunks:
                    file.write(chunk)
            is_saved = True
        except BadInput as error:
            _log.warning("capture %s: the dump of rank %d stays with that rank: %s", directory, rank, error)
            is_saved = False
            for _ in chunks:  # the rank sends all of it before it reads the answer
                pass
        group.send_bytes(memoryview(bytes([is_saved])), place)
    except PeerLost as error:
        _log.warning("capture %s: no dump of rank %d (%s)", directory, rank, error)


def _send(group: Group, segment: SegmentView, directory: Path) -> None:
    """Sends this rank's dump to the first rank of the group.

    If that is gone or has no room, writes the dump to this node's disk, from where it can be merged later.
    """
    try:
        group.send_bytes(pack(segment), 0)
        is_saved = b"".join(group.receive_bytes(0)) == bytes([True])
        why = f"rank {group.world_ranks[0]} could not write it"
    except PeerLost as error:
        is_saved, why = False, f"rank {group.world_ranks[0]} is gone ({error})"
    if not is_saved:
        path = directory / fmt.dump_file_name(group.world_rank)
        _log.warning("%s; this rank's dump is %s", why, path)
        write_dump(path, segment)
