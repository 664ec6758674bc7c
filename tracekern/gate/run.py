"""One run: the capture of one launch of the program, reduced to the numbers that a gate needs."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracekern.analysis.left_out import left_out
from tracekern.analysis.statistics import RunStatistics, SpanSums, phase_statistics, statistics_of
from tracekern.errors import BadInput
from tracekern.files import scratch_directory
from tracekern.formatting import brief, without_nan
from tracekern.timeline.load import load
from tracekern.timeline.windowed import load_windows


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_size(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < 1e18  # 30 years in ns


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_text, value))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_size, value.values()))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("run_id", "created", "command", "device", "backend"), _is_text),
    **dict.fromkeys(("nodes", "losses"), _are_texts),
    **dict.fromkeys(("metrics", "spans"), _are_sizes),
    **dict.fromkeys(("resolution_ns", "probe_cost_ns"), _is_size),
    "clock_hard_ns": lambda value: value is None or _is_size(value),
    "shape": lambda value: isinstance(value, dict),
    "aligned": lambda value: isinstance(value, bool),
}
"""Field of a run in a file -> check of its value."""


@dataclass(frozen=True)
class Run:
    source: str
    """Path of its capture, or of the file that holds its numbers."""
    run_id: str
    created: str
    command: str
    device: str
    backend: str
    nodes: tuple[str, ...]
    shape: Mapping[str, Any]
    """Values that must be equal for runs to be comparable: settings, ranks, iterations, launch sizes."""
    metrics: Mapping[str, float]
    spans: Mapping[str, int]
    """Phase -> number of spans behind its numbers."""
    resolution_ns: float
    probe_cost_ns: float
    clock_hard_ns: float
    aligned: bool
    losses: tuple[str, ...] = ()

    __repr__ = brief

    @property
    def num_measured(self) -> int:
        """Iterations behind the numbers: all but the first, unless it is the only one."""
        iterations = self.shape.get("iterations", 1)
        return max(iterations - 1, 1) if isinstance(iterations, int) else 1

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; a bound that is not finite becomes None."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "source"}
        values["metrics"] = {name: float(f"{value:.6g}") for name, value in self.metrics.items()}
        values["clock_hard_ns"] = round(self.clock_hard_ns, 1) if math.isfinite(self.clock_hard_ns) else None
        return values

    @staticmethod
    def from_dict(source: str, values: Any) -> Run:
        """Restores a run from as_dict(). Raises BadInput for anything else."""
        if not isinstance(values, dict) or set(values) != set(_CHECKS):
            raise BadInput(f"{source}: a run in it has other fields than {', '.join(sorted(_CHECKS))}; record it again")
        for name, is_right in _CHECKS.items():
            if not is_right(values[name]):
                got = str(values[name])[:60]
                raise BadInput(f"{source}: field {name} of a run is {got}, which cannot be; record it again")
        lists = {name: tuple(values[name]) for name in ("nodes", "losses")}
        bound = float("inf") if values["clock_hard_ns"] is None else values["clock_hard_ns"]
        return Run(source=source, **{**values, **lists, "clock_hard_ns": bound})


def read_run(
    path: Path, unaligned: bool = False, memory: int | None = None, tell: Callable[[str], None] = lambda _: None
) -> Run:
    """Reads the run whose capture is in directory `path`, in windows where it does not fit into memory.

    memory: bytes, as of Cost.of(). tell: takes a line about windows. Raises BadInput if it cannot be read.
    """
    from tracekern.analysis.in_windows import Cost

    cost = Cost.of([path], memory)
    cost = dataclasses.replace(cost, num_processes=1, disk_a_span=30, ns_a_span=2_500)
    if cost.fits:
        timeline = load(path, unaligned=unaligned)
        return make_run(str(path), phase_statistics(timeline), timeline, timeline.ranks[0].metadata)
    tell(f"{path}: in windows: {cost.in_windows()}")
    with scratch_directory() as scratch:
        run = load_windows(path, scratch, cost.spans_of_window, unaligned=unaligned)
        if run.why_whole:
            tell(f"{path}: all launches are one window: {run.why_whole}; {cost.in_memory()}")
        parts = (SpanSums.of(run.part(number)) for number in range(1 + len(run.windows)))
        statistics = statistics_of(run.skeleton, functools.reduce(operator.add, parts))
        return make_run(str(path), statistics, run.skeleton, run.skeleton.ranks[0].metadata)


def _describe_device(timeline: Any) -> str:
    """Returns the devices. Ranks that share one take other times than ranks with one each: they are another device."""
    names = " + ".join(sorted({rank.device for rank in timeline.ranks}))
    num_residents = max(rank.metadata.get("num_residents", 1) for rank in timeline.ranks)
    return f"{names}, {num_residents} resident ranks" if num_residents > 1 else names


def make_run(source: str, statistics: RunStatistics, timeline: Any, about: Mapping[str, Any]) -> Run:
    """Makes a run. timeline: the Timeline behind the statistics. about: metadata of its first rank."""
    grids: dict[str, set[tuple[int, int]]] = {}
    settings = about.get("settings")
    for launch in timeline.launches:
        grids.setdefault(launch.name, set()).add((launch.num_blocks, launch.warps_per_block))
    return Run(
        source=source,
        run_id=str(about.get("run_id", "")),
        created=str(about.get("created", "")),
        command=str(about.get("command", "")),
        device=_describe_device(timeline),
        backend=" + ".join(sorted({rank.backend for rank in timeline.ranks})),
        nodes=tuple(sorted({rank.metadata.get("node", rank.node) for rank in timeline.ranks})),
        shape={
            "ranks": len(timeline.ranks),
            "iterations": statistics.num_iterations,
            "launches": {
                name: " ".join(f"{blocks}x{warps}" for blocks, warps in sorted(found)) for name, found in grids.items()
            },
            "settings": dict(settings) if isinstance(settings, Mapping) else {},
            **({"left_out": said} if (said := left_out(timeline)) else {}),
        },
        metrics=statistics.metrics(),
        spans={phase.name: phase.num_spans for phase in statistics.phases},
        resolution_ns=statistics.resolution_ns,
        probe_cost_ns=statistics.probe_cost_ns,
        clock_hard_ns=statistics.clock_hard_ns,
        aligned=timeline.aligned,
        losses=statistics.losses,
    )


def find_captures(path: Path) -> list[Path]:
    """Returns `path` itself if it is a capture directory, else those in it. Raises BadInput if there are none."""
    if not path.exists():
        raise BadInput(f"{path}: does not exist; name a capture directory, or one that holds several")
    found = [path] if _is_capture(path) else sorted(filter(_is_capture, path.iterdir())) if path.is_dir() else []
    if not found:
        raise BadInput(f"{path}: no capture in it or one level below (no rank_*.tkdump); wanted a capture directory")
    return found


def difference(first: Run, second: Run) -> str:
    """Returns the first difference of two runs' shapes in words, the second run first; "" for none."""
    found = _first_difference(first.shape, second.shape)
    if found is None:
        return ""
    key, a, b = found
    return f"{key} is {_show(b)} in {second.source}, {_show(a)} in {first.source}"


def _first_difference(
    first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = ""
) -> tuple[str, Any, Any] | None:
    """Returns the key and both values of the first difference. Settings come first, as the rest follows from them."""
    for key in sorted(first.keys() | second.keys(), key=lambda key: (key != "settings", key)):
        a, b = first.get(key), second.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            if inner := _first_difference(a, b, f"{prefix}{key}."):
                return inner
        elif without_nan(a) != without_nan(b):
            return f"{prefix}{key}", a, b
    return None


def _show(value: Any) -> str:
    return "missing" if value is None else str(value)[:60]


def _is_capture(path: Path) -> bool:
    """Returns whether `path` is a capture, even one that lost its dumps.

    Reading such a capture raises an error; skipping it would silently check fewer launches.
    """
    return path.is_dir() and (any(path.glob("rank_*.tkdump")) or (path / "capture.json").exists())
