"""Reads a Chrome trace of torch.profiler or another profiler, when a capture stores it and when its lanes are drawn."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from tracekern.dump.format import MAX_NS
from tracekern.errors import BadInput
from tracekern.formatting import count

LANE_PREFIX = "torch "
"""Prefix of the names of a profile's lanes."""
STREAM_PREFIX = f"{LANE_PREFIX}stream "
"""Prefix of those that show what ran on a stream of a GPU."""

Row = tuple[int, int, str]
"""A span of a profile: begin and end in CLOCK_REALTIME ns, either of which may be impossible, and its name."""

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
"""Categories of torch.profiler's events whose thread number is a stream's."""


@dataclass(frozen=True)
class Profile:
    """What a file of a profiler holds."""

    lanes: dict[tuple[str, str], list[Row]]
    """Spans by (process, lane), with one lane for each thread or stream."""
    left_out: tuple[str, ...]
    """What cannot be drawn: how many of what, and why."""


def read_profile(path: Path, rank: int, num_ranks: int, told: str | Path | None = None) -> Profile:
    """Reads a .json or .json.gz in Chrome's format: an object, an array, or an object a line, also of NCCL's inspector.

    Spans are complete events, and pairs of a begin and an end. told: what errors call the file, if it is one that the
    user has never seen. Raises BadInput if it is no such file, or not of `rank` of `num_ranks`.
    """
    told = told or path
    trace = _read_chrome(path, told)
    _check_rank(told, trace.about_ranks, rank, num_ranks)
    lanes: dict[tuple[str, str], list[Row]] = {}
    open_spans: dict[tuple[str, str], list[tuple[int, str]]] = {}
    skipped: Counter[str] = Counter()
    for event in trace.events:
        phase = event.get("ph") if isinstance(event, dict) else None
        if phase == "b":
            skipped["asynchronous span"] += 1
        if phase not in ("X", "B", "E") or event.get("cat") == "Trace":
            continue
        try:
            start = trace.base_ns + _ns(event["ts"])
            end = start + _ns(event.get("dur", 0))
        except (KeyError, TypeError, ValueError, ArithmeticError):
            raise BadInput(f"{told}: event {str(event)[:60]} has no time; damaged, export it again") from None
        process, number, name = (_text(event.get(key)) for key in ("pid", "tid", "name"))
        kind = "stream" if event.get("cat") in _GPU_CATEGORIES else "thread"
        lane = (process, f"{LANE_PREFIX}{kind} {number}")
        if phase == "X":
            lanes.setdefault(lane, []).append((start, end, name))
        elif phase == "B":
            open_spans.setdefault(lane, []).append((start, name))
        elif open_spans.get(lane):
            begin, name = open_spans[lane].pop()
            lanes.setdefault(lane, []).append((begin, start, name))
        else:
            skipped["end without a begin"] += 1
    skipped["begin without an end"] = sum(map(len, open_spans.values()))
    return Profile(lanes, (*trace.left_out, *(count(number, what) for what, number in skipped.items() if number)))


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


@dataclass(frozen=True)
class _Trace:
    events: list[Any]
    base_ns: int = 0
    """Since 1970, that times count from."""
    about_ranks: Any = None
    left_out: tuple[str, ...] = ()


def _read_chrome(path: Path, told: str | Path) -> _Trace:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        # Names are whatever the program gave them: bytes that are no UTF-8, and characters that JSON does not allow.
        text = data.decode(json.detect_encoding(data), errors="replace")
        trace, left_out = _parse(text)
    except FileNotFoundError:
        raise BadInput(f"{told}: no such file; wanted a Chrome trace of a profiler") from None
    except (OSError, EOFError, ValueError, ArithmeticError, RecursionError, zlib.error) as error:
        raise BadInput(f"{told}: not a Chrome trace ({error}); damaged, export it again") from None
    if isinstance(trace, dict) and "coll_perf" in trace:
        trace = [trace]
    if isinstance(trace, list) and all(isinstance(event, dict) for event in trace):
        return _Trace([_as_event(event) for event in trace], left_out=left_out)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise BadInput(f"{told}: no traceEvents: not a Chrome trace; export it with prof.export_chrome_trace")
    about = trace.get("metadata")
    if isinstance(about, dict) and str(about.get("written_by", "")).startswith("tracekern "):
        raise BadInput(
            f"{told}: was written by tracekern itself, its spans would be drawn twice; wanted a trace of torch.profiler"
        )
    told_by = trace if "baseTimeNanoseconds" in trace else trace.get("viztracer_metadata")
    base_ns = told_by.get("baseTimeNanoseconds", 0) if isinstance(told_by, dict) else 0
    if not isinstance(base_ns, int) or not 0 <= base_ns < MAX_NS:
        raise BadInput(f"{told}: baseTimeNanoseconds is {str(base_ns)[:40]}, wanted ns since 1970; damaged")
    return _Trace(trace["traceEvents"], base_ns, trace.get("distributedInfo"), left_out)


def _parse(text: str) -> tuple[Any, tuple[str, ...]]:
    """Returns what the JSON says, and what is missing of it: its end may be, and it may be an object a line."""
    decoder = json.JSONDecoder(parse_float=Decimal, strict=False)
    try:
        return decoder.decode(text), ()
    except ValueError:
        with contextlib.suppress(ValueError):
            if lines := [decoder.decode(line) for line in text.splitlines() if line.strip()]:
                return lines, ()
        if whole := _whole_events(text, decoder):
            return whole, ("the end of the file, which is cut off",)
        raise


def _whole_events(text: str, decoder: json.JSONDecoder) -> dict[str, Any]:
    """The object of a trace whose end is missing, with the events that are whole; {}: there are none."""
    head = re.match(r'\s*(\{.*?"traceEvents"\s*:\s*\[)', text, re.DOTALL)
    events, at = list[Any](), head.end() if head else len(text)
    with contextlib.suppress(ValueError):
        while True:
            at = re.compile(r"[\s,]*").match(text, at).end()  # type: ignore[union-attr]  # matches anything
            event, at = decoder.raw_decode(text, at)
            events.append(event)
    return {**decoder.decode(f"{head[1]}]}}"), "traceEvents": events} if head and events else {}


def _as_event(line: dict[str, Any]) -> dict[str, Any]:
    """A line of NCCL's inspector as an event, which ends when the line was written; others as they are."""
    call = line.get("coll_perf")
    if not isinstance(call, dict):
        return line
    took_us, end_us = call.get("coll_exec_time_us", 0), call.get("dump_timestamp_us", 0)
    numbers = isinstance(took_us, int | Decimal) and isinstance(end_us, int | Decimal)
    times = {"ts": end_us - took_us, "dur": took_us} if numbers else {}
    return {"ph": "X", "pid": 0, "tid": "NCCL", "name": call.get("coll"), **times}


def _text(value: Any) -> str:
    """Returns the value as text without lone surrogates, which JSON may hold and which cannot be written."""
    return str(value).encode(errors="replace").decode()
