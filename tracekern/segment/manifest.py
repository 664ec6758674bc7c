"""capture.json, the table of contents of a capture directory: written last, by rank 0 or by the launcher."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tracekern.dump import format as fmt
from tracekern.dump.reader import peek_metadata
from tracekern.errors import BadInput
from tracekern.segment.pack import file_of_capture


def write_manifest(directory: Path, run_id: str) -> list[int]:
    """List the dumps of a run in `directory`. Returns their ranks. Raises BadInput when it cannot be written."""
    entries = []
    newest: dict[str, Any] = {}
    for path in sorted(directory.glob("rank_*.tkdump")):
        metadata = peek_metadata(path)
        if metadata["run_id"] == run_id:
            newest = metadata
            size = path.stat().st_size
            entries.append({"rank": metadata["rank"], "file": path.name, "bytes": size, "state": metadata["state"]})
    manifest = {
        "format": fmt.CAPTURE_FORMAT,
        "version": fmt.CAPTURE_VERSION,
        "run_id": run_id,
        "num_ranks": len(fmt.ranks_of(newest)) if newest else 0,
        "created": newest.get("created", ""),
        "command": newest.get("command", ""),
        "ranks": entries,
    }
    with file_of_capture(directory / fmt.MANIFEST_NAME) as file:
        file.write(json.dumps(manifest, indent=1).encode())
    return [int(str(entry["rank"])) for entry in entries]


def forget_old_capture(directory: Path, rank: int, replaced: Collection[int] | None = None) -> None:
    """Removes what an earlier capture left: this rank's files; on a capture's first rank also those of ranks that are
    not among `replaced`, whose own do so, and the earlier trace, which could be taken for a trace of the new dumps.

    Raises BadInput for a directory that cannot be written.
    """
    try:
        _forget(directory, rank, replaced)
    except OSError as error:
        raise BadInput(f"{directory}: cannot be written ({error.strerror}); choose another directory") from None


def _forget(directory: Path, rank: int, replaced: Collection[int] | None) -> None:
    (directory / fmt.dump_file_name(rank)).unlink(missing_ok=True)
    (directory / fmt.torch_profile_file_name(rank)).unlink(missing_ok=True)
    if replaced is not None:
        (directory / fmt.MANIFEST_NAME).unlink(missing_ok=True)
        trace = directory / fmt.TRACE_NAME
        if trace.is_symlink() or trace.is_file():
            trace.unlink()
        keep = {name(idx) for idx in replaced for name in (fmt.dump_file_name, fmt.torch_profile_file_name)}
        for pattern in ("rank_*.tkdump", "rank_*.torch.json.gz"):
            for path in directory.glob(pattern):
                if path.name not in keep:
                    path.unlink(missing_ok=True)
