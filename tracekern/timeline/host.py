"""Lanes of the host: Python ranges of the capture and torch.profiler's trace, on the axis of the kernels."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from tracekern.errors import BadInput
from tracekern.record.dump import Dump
from tracekern.timeline.model import MAX_NS, Int64

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
"""Of torch.profiler's events: those whose thread number is a stream's."""


@dataclass(frozen=True)
class HostLane:
    """One thread, or stream by CUPTI: [n] spans in CLOCK_REALTIME ns, sorted by (start, -end)."""

    name: str
    start: Int64
    end: Int64
    labels: tuple[str, ...]


def host_lanes(dump: Dump) -> list[HostLane]:
    """The ranges that `capture.range(...)` recorded, one lane a thread."""
    spans = dump.host_spans()
    lanes = []
    for number, thread in enumerate(dict.fromkeys(spans["thread"].tolist())):
        mine = spans[spans["thread"] == thread]
        labels = [label.decode(errors="replace") for label in mine["name"].tolist()]
        start = mine["start_ns"]
        end = np.maximum(mine["end_ns"], start)  # the wall clock may have been set back meanwhile
        lanes.append(_lane("python" if number == 0 else f"python thread {thread}", start, end, labels))
    return lanes


def torch_lanes(path: Path) -> list[HostLane]:
    """The lanes of a Chrome trace of torch.profiler (.json or .json.gz), one a thread and one a stream of a GPU.

    Raises BadInput when it is not one.
    """
    events, base_ns = _read_chrome(path)
    lanes: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or event.get("cat") == "Trace":
            continue
        try:
            start = base_ns + _ns(event["ts"])
            end = start + _ns(event.get("dur", 0))
        except (KeyError, TypeError, ValueError, ArithmeticError):
            raise BadInput(f"{path}: event {str(event)[:60]} has no time; damaged, export it again") from None
        if not -MAX_NS < start <= end < MAX_NS:
            raise BadInput(f"{path}: event {str(event)[:60]} has an impossible time; damaged, export it again")
        process, number, name = (_text(event.get(key)) for key in ("pid", "tid", "name"))
        kind = "stream" if event.get("cat") in _GPU_CATEGORIES else "thread"
        lanes.setdefault((process, f"torch {kind} {number}"), []).append((start, end, name))
    result = []
    for (_, lane), rows in lanes.items():
        times = np.array([row[:2] for row in rows], np.int64)
        result.append(_lane(lane, times[:, 0], times[:, 1], [row[2] for row in rows]))
    return result


def _ns(microseconds: Any) -> int:
    """Exact: since 1970 there are more microseconds than the digits of a float."""
    limit = Decimal(2 * MAX_NS)  # out of range whatever the base: the digits of a larger one would fill the memory
    return round(max(min(Decimal(microseconds) * 1000, limit), -limit))


def _read_chrome(path: Path) -> tuple[list[Any], int]:
    try:
        data = path.read_bytes()
        trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data, parse_float=Decimal)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; wanted a Chrome trace of torch.profiler") from None
    except (OSError, EOFError, ValueError, ArithmeticError, RecursionError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise BadInput(f"{path}: not a Chrome trace ({error}); damaged, export it again") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise BadInput(
            f"{path}: no traceEvents: not a trace of torch.profiler; export it with prof.export_chrome_trace"
        )
    about = trace.get("metadata")
    if isinstance(about, dict) and str(about.get("written_by", "")).startswith("tracekern "):
        raise BadInput(
            f"{path}: was written by tracekern itself, its spans would be drawn twice; wanted a trace of torch.profiler"
        )
    base_ns = trace.get("baseTimeNanoseconds", 0)
    if not isinstance(base_ns, int) or not 0 <= base_ns < MAX_NS:
        raise BadInput(f"{path}: baseTimeNanoseconds is {str(base_ns)[:40]}, wanted ns since 1970; damaged")
    return trace["traceEvents"], base_ns


def _text(value: Any) -> str:
    """JSON may hold halves of surrogate pairs, which nobody can write."""
    return str(value).encode(errors="replace").decode()


def _lane(name: str, start: Int64, end: Int64, labels: list[str]) -> HostLane:
    order = np.lexsort((-end, start))
    return HostLane(name, start[order], end[order], tuple(labels[idx] for idx in order.tolist()))
