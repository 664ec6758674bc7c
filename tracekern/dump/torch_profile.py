"""Reads a Chrome trace of torch.profiler, both when a capture stores it and when its lanes are drawn."""

from __future__ import annotations

import gzip
import json
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

from tracekern.dump.format import MAX_NS
from tracekern.errors import BadInput

LANE_PREFIX = "torch "
"""Prefix of the names of a profile's lanes."""
STREAM_PREFIX = f"{LANE_PREFIX}stream "
"""Prefix of those that show what ran on a stream of a GPU."""

Row = tuple[int, int, str]
"""A span of a profile: begin and end in CLOCK_REALTIME ns, either of which may be impossible, and its name."""

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
"""Categories of torch.profiler's events whose thread number is a stream's."""


def read_profile(
    path: Path, rank: int, num_ranks: int, told: str | Path | None = None
) -> dict[tuple[str, str], list[Row]]:
    """Reads a .json or .json.gz. Returns the spans by (process, lane), with one lane for each thread or stream.

    told: what errors call the file, if it is one that the user has never seen. Raises BadInput if it is not a trace of
    torch.profiler, or not of `rank` of `num_ranks`.
    """
    told = told or path
    events, base_ns, about_ranks = _read_chrome(path, told)
    _check_rank(told, about_ranks, rank, num_ranks)
    lanes: dict[tuple[str, str], list[Row]] = {}
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or event.get("cat") == "Trace":
            continue
        try:
            start = base_ns + _ns(event["ts"])
            end = start + _ns(event.get("dur", 0))
        except (KeyError, TypeError, ValueError, ArithmeticError):
            raise BadInput(f"{told}: event {str(event)[:60]} has no time; damaged, export it again") from None
        process, number, name = (_text(event.get(key)) for key in ("pid", "tid", "name"))
        kind = "stream" if event.get("cat") in _GPU_CATEGORIES else "thread"
        lanes.setdefault((process, f"{LANE_PREFIX}{kind} {number}"), []).append((start, end, name))
    return lanes


def _check_rank(told: str | Path, about: Any, rank: int, num_ranks: int) -> None:
    """Raises BadInput if the profile names another rank. Ranks of a job of another size are numbered otherwise."""
    theirs = about.get("rank") if isinstance(about, dict) else None
    if isinstance(theirs, int) and theirs != rank and about.get("world_size", num_ranks) == num_ranks:
        said = "its distributedInfo says so"
        raise BadInput(f"{told}: is of rank {theirs} ({said}), given for rank {rank}; give it for rank {theirs}")


def _ns(microseconds: Any) -> int:
    """Converts exactly: a float has too few digits for the microseconds since 1970."""
    limit = Decimal(2 * MAX_NS)  # beyond any valid time; the digits of a huge number would fill the memory
    return round(max(min(Decimal(microseconds) * 1000, limit), -limit))


def _read_chrome(path: Path, told: str | Path) -> tuple[list[Any], int, Any]:
    """Returns the events, the ns since 1970 that their times count from, and what is said of ranks."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        # Names are whatever the program gave them: bytes that are no UTF-8, and characters that JSON does not allow.
        text = data.decode(json.detect_encoding(data), errors="replace")
        trace = json.loads(text, parse_float=Decimal, strict=False)
    except FileNotFoundError:
        raise BadInput(f"{told}: no such file; wanted a Chrome trace of torch.profiler") from None
    except (OSError, EOFError, ValueError, ArithmeticError, RecursionError, zlib.error) as error:
        raise BadInput(f"{told}: not a Chrome trace ({error}); damaged, export it again") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise BadInput(
            f"{told}: no traceEvents: not a trace of torch.profiler; export it with prof.export_chrome_trace"
        )
    about = trace.get("metadata")
    if isinstance(about, dict) and str(about.get("written_by", "")).startswith("tracekern "):
        raise BadInput(
            f"{told}: was written by tracekern itself, its spans would be drawn twice; wanted a trace of torch.profiler"
        )
    base_ns = trace.get("baseTimeNanoseconds", 0)
    if not isinstance(base_ns, int) or not 0 <= base_ns < MAX_NS:
        raise BadInput(f"{told}: baseTimeNanoseconds is {str(base_ns)[:40]}, wanted ns since 1970; damaged")
    return trace["traceEvents"], base_ns, trace.get("distributedInfo")


def _text(value: Any) -> str:
    """Returns the value as text without lone surrogates, which JSON may hold and which cannot be written."""
    return str(value).encode(errors="replace").decode()
