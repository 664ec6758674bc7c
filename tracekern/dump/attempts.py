"""Attempts at a capture: where one goes whose directory holds evidence, and which ones came later.

The dumps of a run with a fault stay where they are, and so do those of a run that did not end whole. What is captured
afterwards goes to `attempt-1` in that directory, then to `attempt-2`; so does what a launcher starts again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tracekern.dump.reader import peek_metadata
from tracekern.errors import BadInput
from tracekern.formatting import ranks

_NAME = re.compile(r"attempt-([1-9]\d{0,8})")
_DUMPS = "rank_*.tkdump"


def place_of(directory: Path, attempt: int) -> Path:
    """Returns where an attempt is captured; 0 is the first."""
    return directory / f"attempt-{attempt}" if attempt else directory


def choose_attempt(directory: Path, restarts: int, run_id: str = "") -> tuple[int, str]:
    """Returns the next attempt that would replace no evidence of another run, and why it is not the first.

    restarts: how often the launcher has started the job again.
    """
    attempt, why = restarts, ""
    if restarts:
        why = f"{directory}: attempt {restarts} of this job is captured into {place_of(directory, restarts)}"
    while kept := _evidence(before := place_of(directory, attempt), run_id):
        attempt += 1
        why = f"{before}: keeps {kept}: this capture goes to {place_of(directory, attempt)}"
    return attempt, why


def is_attempt_of(directory: Path, place: Path) -> bool:
    """Returns whether a capture in `place`, without links in its path, was meant for `directory`."""
    return place.parent == directory.resolve() and _NAME.fullmatch(place.name) is not None


def later_attempts(directory: Path) -> list[Path]:
    """Returns the attempts after the one in `directory`, the newest last. What an earlier job left is none of them."""
    own = _NAME.fullmatch(directory.name)
    first, base = (int(own[1]), directory.parent) if own else (0, directory)
    numbers = sorted(int(found[1]) for place in base.glob("attempt-*") if (found := _NAME.fullmatch(place.name)))
    later = [place_of(base, number) for number in numbers if number > first]
    since = _opened(directory) if later else ""
    return [place for place in later if _opened(place) >= since != ""]


def describe_later(directory: Path) -> str:
    """Returns one line that names the newest of later_attempts(); "" if there are none."""
    if not (later := later_attempts(directory)):
        return ""
    are = "attempt is" if len(later) == 1 else "attempts are"
    return f"{len(later)} later {are} beside this one; the newest: {later[-1]}"


def _evidence(directory: Path, run_id: str) -> str:
    """Returns what must not be replaced of runs other than `run_id`: a fault, or what some ranks left; "" for none."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for metadata in _metadata_of(directory):
        if metadata["run_id"] != run_id:
            runs.setdefault(str(metadata["run_id"]), []).append(metadata)
    for run, dumps in runs.items():
        if any(metadata.get("fault") or metadata.get("fault_text") for metadata in dumps):
            return f"the fault of run {run}"
    for run, dumps in runs.items():
        closed = {metadata["rank"] for metadata in dumps if metadata["state"] == "closed"}
        if open_ranks := sorted(set(range(dumps[0]["num_ranks"])) - closed):
            return f"what is left of run {run}, which {ranks(open_ranks)} did not end"
    return ""


def _opened(directory: Path) -> str:
    """Returns when the capture in a directory was opened, in ISO 8601; "" if there is none."""
    return max((str(metadata["created"]) for metadata in _metadata_of(directory)), default="")


def _metadata_of(directory: Path) -> list[dict[str, Any]]:
    found = []
    for dump in sorted(directory.glob(_DUMPS)) if os.path.isdir(directory) else ():
        try:
            found.append(peek_metadata(dump))
        except BadInput:  # of another version, or damaged
            continue
    return found
