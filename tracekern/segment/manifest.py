"""capture.json, the table of contents of a capture directory: written last, by rank 0 or by the launcher."""

from __future__ import annotations

import json
from pathlib import Path

from tracekern.dump import format as fmt
from tracekern.dump.reader import peek_metadata
from tracekern.segment.pack import file_of_capture


def write_manifest(directory: Path, run_id: str) -> list[int]:
    """List the dumps of a run in `directory`. Returns their ranks. Raises BadInput when it cannot be written."""
    entries = []
    newest: dict[str, object] = {}
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
        "num_ranks": newest.get("num_ranks", 0),
        "created": newest.get("created", ""),
        "command": newest.get("command", ""),
        "ranks": entries,
    }
    with file_of_capture(directory / fmt.MANIFEST_NAME) as file:
        file.write(json.dumps(manifest, indent=1).encode())
    return [int(str(entry["rank"])) for entry in entries]


def forget_old_capture(directory: Path, rank: int, num_ranks: int) -> None:
    """Remove what an earlier capture left: this rank's files; on rank 0 also files that no rank of this run replaces.

    Rank 0 removes the earlier trace, too, which could be taken for a trace of the new dumps.
    """
    (directory / fmt.dump_file_name(rank)).unlink(missing_ok=True)
    (directory / fmt.torch_profile_file_name(rank)).unlink(missing_ok=True)
    if rank == 0:
        (directory / fmt.MANIFEST_NAME).unlink(missing_ok=True)
        trace = directory / fmt.TRACE_NAME
        if trace.is_symlink() or trace.is_file():
            trace.unlink()
        keep = {name(idx) for idx in range(num_ranks) for name in (fmt.dump_file_name, fmt.torch_profile_file_name)}
        for pattern in ("rank_*.tkdump", "rank_*.torch.json.gz"):
            for path in directory.glob(pattern):
                if path.name not in keep:
                    path.unlink(missing_ok=True)
