"""Attempts at a capture: what was captured beside evidence that stays, and which of it came later.

The dumps of a run with a fault stay where they are, and so do those of a run that did not end whole. What is captured
afterwards goes to `attempt-1` in that directory, then to `attempt-2` (tracekern/record/attempt_choice.py); so does what
a launcher starts again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tracekern.dump.reader import peek_metadata
from tracekern.errors import BadInput
from tracekern.host_clock import Moment

_NAME = re.compile(r"attempt-([1-9]\d{0,8})")
_DUMPS = "rank_*.tkdump"


def place_of(directory: Path, attempt: int) -> Path:
    """Returns where an attempt is captured; 0 is the first."""
    return directory / f"attempt-{attempt}" if attempt else directory


def places_in(directory: Path) -> list[tuple[int, Path]]:
    """Returns the number and the place of each attempt that has been made into `directory`, in order."""
    names = os.listdir(directory) if os.path.isdir(directory) and os.access(directory, os.R_OK) else ()
    numbers = sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)
    return [(number, place_of(directory, number)) for number in (0, *numbers)]


def is_attempt_of(directory: Path, place: Path) -> bool:
    """Returns whether a capture in `place`, without links in its path, was meant for `directory`."""
    return place.parent == Path(os.path.realpath(directory)) and _NAME.fullmatch(place.name) is not None


def later_attempts(directory: Path) -> list[Path]:
    """Returns the attempts after the one in `directory`, the newest last. What an earlier job left is none of them."""
    own = _NAME.fullmatch(directory.name)
    first, base = (int(own[1]), directory.parent) if own else (0, directory)
    later = [place for number, place in places_in(base) if number > first]
    since = _opened(directory) if later else None
    if since is None:
        return []
    return [place for place in later if (opened := _opened(place)) is not None and not opened.is_before(since)]


def describe_later(directory: Path) -> str:
    """Returns one line that names the newest of later_attempts(); "" if there are none."""
    if not (later := later_attempts(directory)):
        return ""
    are = "attempt is" if len(later) == 1 else "attempts are"
    return f"{len(later)} later {are} beside this one; the newest: {later[-1]}"


def metadata_of(directory: Path) -> list[dict[str, Any]]:
    """Returns the metadata of the dumps in a directory that can be read."""
    found = []
    for dump in sorted(directory.glob(_DUMPS)) if os.path.isdir(directory) else ():
        try:
            found.append(peek_metadata(dump))
        except BadInput:  # of another version, or damaged
            continue
    return found


def _opened(directory: Path) -> Moment | None:
    """Returns when the capture in a directory was opened; None if there is none."""
    newest = None
    for moment in map(Moment.of_opening, metadata_of(directory)):
        newest = moment if newest is None or newest.is_before(moment) else newest
    return newest
