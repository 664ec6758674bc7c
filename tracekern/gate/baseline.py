"""Runs kept on disk as `.tracekern/<device>/0001_<commit>_<date>.json`, numbered like pytest-benchmark's files."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tracekern import __version__
from tracekern.errors import BadInput
from tracekern.files import write_whole
from tracekern.formatting import whole_number
from tracekern.gate.run import Run, difference, find_captures, read_run

FORMAT = "tracekern-baseline"
VERSION = 1
STORAGE = Path(".tracekern")
_NAME = re.compile(r"(\d{4,})_.*\.json")


class NoBaseline(BadInput):
    """No baseline has been saved for this device."""


def save(runs: Sequence[Run], storage: Path = STORAGE) -> Path:
    """Saves `runs`, all of one device, under the next number. Returns the file."""
    return keep(storage / slug(runs[0].device), lambda path, commit: write(path, runs, commit))


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Locks the folder against other checks until the block ends. Does nothing if it cannot be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ImportError):
            import fcntl  # which Windows has not

            descriptor = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def keep(directory: Path, write_to: Callable[[Path, dict[str, Any]], None]) -> Path:
    """Has the folder's next file written, 0003_<commit>_<date>.json, and returns its path.

    Makes the folder. Raises BadInput if it cannot. write_to: takes the path and the commit.
    """
    commit = commit_info()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{directory}: cannot be made ({error.strerror}); choose another place for baselines") from None
    with held(directory):
        number = max((number for number, _ in numbered(directory)), default=0) + 1
        today = datetime.datetime.now(datetime.timezone.utc)
        path = directory / f"{number:04}_{commit['id'][:12] or 'uncommitted'}_{today:%Y%m%d}.json"
        write_to(path, commit)
    return path


def write(path: Path, runs: Sequence[Run], commit: dict[str, Any]) -> None:
    """Writes the file of `runs`; it appears whole or not at all."""
    kept = [run.as_dict() for run in runs]
    write_document(path, FORMAT, VERSION, commit, {"device": runs[0].device, "shape": runs[0].shape, "runs": kept})


def write_document(path: Path, kind: str, version: int, commit: dict[str, Any], content: dict[str, Any]) -> None:
    about = {"format": kind, "version": version, "created": now(), "commit": commit, "machine": machine_info()}
    write_whole(path, json.dumps({**about, **content}, indent=1) + "\n")


def read(path: Path) -> list[Run]:
    """Reads the runs in a file that write() made. Raises BadInput for any other file."""
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); name a baseline, a capture, or latest") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: is not JSON ({str(error)[:80]}); wanted a baseline that check --save wrote") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadInput(f"{path}: is not a baseline; wanted one that check --save wrote")
    if document.get("version") != VERSION:
        raise BadInput(
            f"{path}: baseline version {str(document.get('version'))[:20]}, this tracekern knows {VERSION}; save it "
            "again with check --save"
        )
    runs = document.get("runs")
    if not isinstance(runs, list) or not runs:
        raise BadInput(f"{path}: holds no runs; save it again with check --save")
    return [Run.from_dict(str(path), values) for values in runs]


def find(text: str, like: Run, storage: Path = STORAGE) -> Path:
    """Returns the file that `text` names: a path, a number as in 0003, or "latest".

    latest: the newest of the same shape and device, preferably of the same hosts. like: a run that will be compared
    with it. Raises NoBaseline if nothing was saved, BadInput naming what was saved if `text` does not match.
    """
    wanted = whole_number(text)
    if text != "latest" and wanted is None:
        return Path(text)
    directory = storage / slug(like.device)
    kept = numbered(directory)
    if not kept:
        raise NoBaseline(f"no baseline in {directory}; keep one with tracekern check --save RUN...")
    if wanted is not None:
        chosen = [path for number, path in kept if number == wanted]
        if not chosen:
            raise BadInput(f"no baseline {wanted:04} in {directory}; it has {kept[0][0]:04} to {kept[-1][0]:04}")
        return chosen[-1]
    reasons, elsewhere = [], []
    for _, path in reversed(kept):
        run = read(path)[0]
        reasons.append(difference(run, like))
        if not reasons[-1] and run.nodes == like.nodes:
            return path
        elsewhere += [] if reasons[-1] else [path]
    if elsewhere:
        return elsewhere[0]
    raise BadInput(f"no baseline of this shape in {directory}: {reasons[0]}, the newest; keep one with --save")


def slug(device: str) -> str:
    """Returns a device's name as a folder's: "NVIDIA H200" becomes "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unknown"


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def machine_info() -> dict[str, Any]:
    return {
        "node": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "tracekern": __version__,
    }


def commit_info() -> dict[str, Any]:
    """Returns the commit of the working directory and whether a file was changed; id "" outside a repository."""
    return {
        "id": _git("rev-parse", "HEAD"),
        "branch": _git("branch", "--show-current"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),  # captures and baselines are untracked
    }


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.decode(errors="replace").strip()  # names of files and branches may hold any bytes


def numbered(directory: Path) -> list[tuple[int, Path]]:
    """Returns the saved files of a folder with their numbers, in order."""
    found = ((_NAME.fullmatch(path.name), path) for path in directory.glob("*.json"))
    return sorted((int(match[1]), path) for match, path in found if match)


def read_any(
    paths: Iterable[Path],
    unaligned: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    memory: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Run]:
    """Reads the runs of captures, of directories of captures, and of files of runs. Calls on_progress(done, total).

    memory, tell: as of read_run().
    """
    sources = [source for path in paths for source in ([path] if path.suffix == ".json" else find_captures(path))]
    resolved = [source.resolve() for source in sources]
    for number, source in enumerate(sources):
        if resolved[number] in resolved[:number]:
            raise BadInput(f"{source}: named twice; one launch of the program counts once")
    runs = []
    for done, source in enumerate(sources, 1):
        runs += read(source) if source.suffix == ".json" else [read_run(source, unaligned, memory, tell)]
        if on_progress:
            on_progress(done, len(sources))
    return runs
