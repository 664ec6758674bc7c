"""Options that more than one command takes, and parsers for their texts."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekern.cli.output import SUFFIXES, quoted
from tracekern.errors import BadInput
from tracekern.formatting import whole_number

if TYPE_CHECKING:
    from tracekern.timeline.model import Timeline


class Tracks(str, enum.Enum):
    block = "block"
    warp = "warp"


def output_path(text: str) -> Path:
    """Parses the path of every option that names an output.

    Raises BadInput for an empty text, as from an unset shell variable, which would otherwise mean the folder ".".
    """
    if not text:
        raise BadInput("the name of what to write is empty; wanted a file or directory")
    return Path(text)


def output_option(metavar: str, help_text: str) -> Any:
    return typer.Option("--output", "-o", metavar=metavar, parser=output_path, help=help_text)


Output = Annotated[Path, output_option("FILE", f"File to write. Its suffix is the format: {SUFFIXES}.")]
Directory = Annotated[Path | None, output_option("DIR", "Directory for capture and trace.")]
Unaligned = Annotated[
    bool,
    typer.Option("--unaligned", help="Use clocks as they are if they cannot be related; the title says so."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse captures that lost records, launches or ranks.")]
Partial = Annotated[bool, typer.Option("--partial", help="Go on without ranks whose dump is missing.")]
Window = Annotated[str | None, typer.Option(metavar="START:END", help="Only this part of the time, as in 1.5ms:2ms.")]
Ranks = Annotated[str | None, typer.Option(metavar="LIST", help="Only these ranks, as in 0,2-4.")]
TrackDetail = Annotated[Tracks, typer.Option(help="A row for each block, or for each warp.")]
Host = Annotated[
    list[str] | None,
    typer.Option(metavar="RANK=FILE", help="A Chrome trace of torch.profiler to show beside the kernels. Repeatable."),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory to use, as in 4GB: what needs more is done in windows of whole calls."),
]
Every = Annotated[int, typer.Option(min=1, metavar="N", help="Only each N-th call: launches whose number N divides.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

_BYTES = {"MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d+)?)(MB|GB|TB)", re.IGNORECASE)
_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_TIME = re.compile(r"(\d{1,18}(?:\.\d+)?)(ns|us|ms|s)?")
_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_MAX_RANKS = 65_536


def parse_window(text: str | None) -> tuple[int, int] | None:
    """Parses "1.5ms:2ms" as (1500000, 2000000), ns from the start of the trace. A number without unit is in ns."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon:
        raise BadInput(f"--window: got {text!r}, wanted START:END, for example 1.5ms:2ms")
    return _parse_time(first, text), _parse_time(last, text)


def check_window(timeline: Timeline, window: tuple[int, int] | None, of_kernels: bool = False) -> None:
    """Raises BadInput if a window, in ns from the start, holds no records although the timeline has some.

    of_kernels: considers only records of kernels.
    """
    check_window_of_parts([timeline], window, of_kernels)


def check_window_of_parts(parts: Iterable[Timeline], window: tuple[int, int] | None, of_kernels: bool = False) -> None:
    """Does the same with the parts of a run, of which it looks at no more than it has to."""
    from tracekern.timeline.model import TrackKind
    from tracekern.timeline.select import select, take_tracks

    if window is None:
        return
    first, last = list[int](), list[int]()
    for part in parts:
        timeline = take_tracks(part, part.tracks_of(TrackKind.DEVICE)) if of_kernels else part
        spans, marks = timeline.spans, timeline.marks
        inside = select(timeline, window)
        if len(inside.spans) or len(inside.marks):
            return
        first += [int(times.min()) for times in (spans.start, marks.time) if len(times)]
        last += [int(times.max(initial=0)) for times in (spans.start, spans.end, marks.time)]
    if first:
        raise nothing_recorded(window, (min(first), max(last)), "by kernels " if of_kernels else "")


def nothing_recorded(window: tuple[int, int], records: tuple[int, int], whose: str = "") -> BadInput:
    """Returns what to raise for a window that holds no records. records: between what times they lie, in ns."""
    from tracekern.formatting import duration

    asked, known = (tuple(map(duration, times)) for times in (window, records))
    return BadInput(
        f"--window: nothing was recorded {whose}from {asked[0]} to {asked[1]}; "
        f"the records lie between {known[0]} and {known[1]}"
    )


def _parse_time(part: str, text: str) -> int:
    match = _TIME.fullmatch(part.strip())
    if not match:
        raise BadInput(
            f"--window: {part!r} in {text!r} is no time; wanted a number and ns, us, ms or s, as in 1.5ms:2ms"
        )
    return round(float(match[1]) * _NS[match[2] or "ns"])


def parse_memory(text: str | None) -> int | None:
    """Parses "4GB" as a number of bytes."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise BadInput(f"--memory: got {text!r}, wanted a number and MB, GB or TB, as in 4GB")
    return round(float(match[1]) * _BYTES[match[2].upper()])


def parse_ranks(text: str | None) -> list[int] | None:
    """Parses "0,2-4" as [0, 2, 3, 4]."""
    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        match = _RANKS.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < _MAX_RANKS:
            raise BadInput(f"--ranks: {part!r} in {text!r} is no rank or range of ranks; wanted for example 0,2-4")
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def check_folders(*outputs: Path | None) -> None:
    """Raises BadInput if an output's folder is missing or cannot be written. Called before the work, not after it."""
    for output in filter(None, outputs):
        if not output.absolute().parent.is_dir():
            if output.parent.exists():
                raise BadInput(f"{output}: {output.parent} is a file; wanted a folder to write in")
            make_it = f"mkdir -p {quoted(output.parent)}"
            raise BadInput(f"{output}: its folder does not exist; wanted a place to write; {make_it}")
        # A link is followed: the file that it names is written.
        if not os.access(Path(os.path.realpath(output)).parent, os.W_OK):
            raise BadInput(f"{output}: its folder cannot be written; name a file in another one")


def check_files(*outputs: Path | None) -> None:
    """Checks as check_folders() does. Also raises BadInput if an output's name exists and is not a file."""
    from tracekern.files import require_regular

    check_folders(*outputs)
    for output in filter(None, outputs):
        require_regular(output)


def parse_host(text: str) -> tuple[int, str]:
    """Parses "3=profile.json" as (3, "profile.json")."""
    number, equals, path = text.partition("=")
    rank = whole_number(number)
    if not equals or rank is None or not path:
        raise BadInput(f"--host: got {text!r}, wanted RANK=FILE, for example 0=profile.json")
    return rank, path


def parse_detail(text: str) -> int | str:
    """Parses "all", "peers" or a number of tiles."""
    if text in ("all", "peers"):
        return text
    try:
        return int(text)
    except ValueError:
        raise BadInput(f"--detail: got {text!r}, wanted all, peers or a number from 0 on") from None


def parse_blocks(text: str) -> tuple[int, dict[str, int]]:
    """Parses the blocks of all kernels, of some by name, or both: "128,combine=304"."""
    common, by_name = 0, {}
    for part in text.split(","):
        name, equals, number = part.rpartition("=")
        value = whole_number(number)
        if value is None or bool(name) != bool(equals):
            raise BadInput(
                f"--blocks: got {text!r}, wanted a number, KERNEL=NUMBER, or several with commas between them"
            )
        if name:
            by_name[name.strip()] = value
        else:
            common = value
    return common, by_name


def parse_records(text: str) -> int | str:
    """Parses "auto" or a number of records."""
    if text == "auto":
        return text
    number = whole_number(text)
    if not number:
        raise BadInput(f"--records-per-track: got {text!r}, wanted auto or a number from 1 on")
    return number
