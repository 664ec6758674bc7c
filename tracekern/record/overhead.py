"""Measures what a span costs on this device: the same arithmetic with and without spans, timed alternately."""

from __future__ import annotations

import functools
import platform
import statistics
from dataclasses import dataclass
from typing import Literal

from tracekern.comm.devices.preflight import why_no_gpu
from tracekern.errors import BadInput

WARPS_PER_SM = (4, 16, 32)
_NUM_STEPS = 125
"""Dependent multiply-adds in a span: less than a microsecond on a GPU."""

Backend = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class SpanCost:
    """Cost of one begin and end, on all SMs at once."""

    warps_per_sm: int
    sink: str
    record_format: str
    region_ns: float
    """Length of the code in the span."""
    span_ns: float
    """Time that the span adds: the median over rounds. The range covers the middle 80 % of the rounds."""
    low_ns: float
    high_ns: float


def measure_span(
    backend: Backend,
    record_format: str,
    warps_per_sm: int,
    sink: str = "host",
    *,
    num_regions: int = 200,
    num_steps: int = _NUM_STEPS,
    num_rounds: int = 7,
) -> SpanCost:
    """Runs the probe kernel num_rounds times with spans and without. The CPU backend has one warp and one sink.

    num_steps: multiply-adds in a span, rounded up to a multiple of 125. Raises BadInput if the backend is missing.
    """
    about = {"num_regions": num_regions, "num_steps": num_steps, "num_rounds": num_rounds}
    if backend == "cpu":
        from tracekern import _core

        off_ms, on_ms = _core.probe_times(record_format=record_format, **about)
    else:
        try:
            from tracekern import _cuda
        except ImportError as error:
            raise BadInput(f"no GPU to measure on: {error}") from None
        off_ms, on_ms = _cuda.probe_times(
            warps_per_sm=warps_per_sm, record_format=record_format, in_host_memory=sink == "host", **about
        )
    added = sorted((on - off) * 1e6 / num_regions for off, on in zip(off_ms, on_ms, strict=True))
    return SpanCost(
        warps_per_sm=warps_per_sm,
        sink=sink,
        record_format=record_format,
        region_ns=statistics.median(off_ms) * 1e6 / num_regions,
        span_ns=statistics.median(added),
        low_ns=added[len(added) // 10],
        high_ns=added[-1 - len(added) // 10],
    )


def find_device(backend: str) -> tuple[Backend, str]:
    """Returns "cpu" or "cuda" and the device's name.

    "auto" selects the GPU if torch sees one. Raises BadInput if "cuda" is asked for and there is no GPU.
    """
    import torch

    missing = "" if backend == "cpu" else why_no_gpu()
    if backend == "cuda" and missing:
        raise BadInput(f"backend cuda: {missing}; take cpu")
    if backend != "cpu" and not missing:
        return "cuda", torch.cuda.get_device_name()
    return "cpu", platform.processor() or platform.machine()


@functools.cache
def overhead_ns(backend: Backend, device: str, record_format: str) -> dict[str, float]:
    """Returns the cost of a span in ns by warps per SM, for the metadata of a capture.

    Measures once per process and `device`, in a few milliseconds. Records go to device memory, so that the result is
    the cost of the recorder and not of the bus.
    """
    densities = (1,) if backend == "cpu" else WARPS_PER_SM
    costs = (measure_span(backend, record_format, warps, "device", num_rounds=5) for warps in densities)
    return {str(cost.warps_per_sm): round(max(cost.span_ns, 0.0), 1) for cost in costs}
