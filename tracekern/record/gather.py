"""How the dumps of all ranks come together when a capture closes, shared disk or not, peers alive or not."""

from __future__ import annotations

import gzip
import logging
import tempfile
from pathlib import Path
from typing import Any

from tracekern.record import format as fmt
from tracekern.record.group import Group
from tracekern.record.manifest import write_manifest
from tracekern.record.pack import pack, replace_atomically, write_dump
from tracekern.record.segment import Segment
from tracekern.record.torch_profile import read_profile

_DISORDER_TIMEOUT_S = 5.0
"""How long a rank that leaves with an error waits for the others before it writes the manifest."""

_log = logging.getLogger("tracekern")


def leave_dump(group: Group, segment: Segment, directory: Path, one_host: bool, in_order: bool) -> None:
    """Write or send this rank's dump; rank 0 writes the manifest last.

    The dump is safe before anybody waits for a peer. Ranks known from the environment alone cannot meet: their
    launcher, or nobody, writes the manifest.
    Raises BadInput when the directory cannot hold the dump.
    """
    if one_host or not group.is_connected:
        write_dump(directory / fmt.dump_file_name(group.rank), segment)
        if not group.is_connected:
            return
        try:
            group.barrier() if in_order else group.barrier(_DISORDER_TIMEOUT_S)
        except RuntimeError as error:
            left = "what a dead rank left, its launcher or `tracekern salvage` packs"
            _log.warning("capture %s: not all ranks closed (%s); %s", directory, _first_line(error), left)
    elif group.rank == 0:
        write_dump(directory / fmt.dump_file_name(0), segment)
        for rank in range(1, group.num_ranks):
            _receive(group, rank, directory)
    else:
        _send(group, segment, directory)
    if group.rank == 0:
        write_manifest(directory, str(segment.metadata["run_id"]))


def save_torch_profile(profile: Any, path: Path) -> Path:
    """Write the Chrome trace of a torch.profiler run, or of the file it was exported to, gzipped, to `path`.

    Raises BadInput for what is none: every reader would refuse the whole capture.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "torch.json"
        if isinstance(profile, str | Path):
            source = Path(profile)
        else:
            profile.export_chrome_trace(str(source))
        read_profile(source)
        data = source.read_bytes()
    with replace_atomically(path) as file:
        file.write(data if data[:2] == b"\x1f\x8b" else gzip.compress(data, 3))
    return path


def _receive(group: Group, rank: int, directory: Path) -> None:
    try:
        with replace_atomically(directory / fmt.dump_file_name(rank)) as file:
            for chunk in group.receive_bytes(rank):
                file.write(chunk)
    except RuntimeError as error:
        _log.warning("capture %s: no dump of rank %d (%s)", directory, rank, _first_line(error))


def _send(group: Group, segment: Segment, directory: Path) -> None:
    """To rank 0; where it is gone, onto the disk of this node, from where it can be merged later."""
    try:
        group.send_bytes(pack(segment), 0)
    except RuntimeError as error:
        path = directory / fmt.dump_file_name(group.rank)
        _log.warning("rank 0 is gone (%s); this rank's dump is %s", _first_line(error), path)
        write_dump(path, segment)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
