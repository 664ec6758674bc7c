"""`tracekern overhead`: measures what a span costs on this machine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from tracekern.cli import options
from tracekern.cli.output import console, note, print_json, table, working
from tracekern.errors import BadInput
from tracekern.formatting import duration

if TYPE_CHECKING:
    from tracekern.record.overhead import Backend, SpanCost


def overhead(
    backend: Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU where there is one.")] = "auto",
    as_json: options.Json = False,
) -> None:
    """Measure what a span adds to a kernel on this machine: short and long, with few and many warps, both sinks."""
    if backend not in ("auto", "cpu", "cuda"):
        raise BadInput(f"--backend is {backend!r}; wanted one of auto, cpu, cuda")
    from tracekern.record.overhead import find_device

    chosen, device = find_device(backend)
    with working("measuring"):
        costs = measure(chosen)
    if as_json:
        print_json({"backend": chosen, "device": device, "spans": [dataclasses.asdict(cost) for cost in costs]})
        return
    out = console()
    out.print(f"{device}: what a span adds")
    if chosen == "cpu":
        out.print("CPU backend: the cost of recording on this processor says nothing about a GPU")
    grid = table(["warps/SM", "span of", "adds", "p10", "p90"], ["sink", "clock"])
    for cost in costs:
        warps = "-" if chosen == "cpu" else str(cost.warps_per_sm)
        times = (cost.region_ns, cost.span_ns, cost.low_ns, cost.high_ns)
        clock = "core cycles" if cost.record_format == "cycles" else "realtime"
        grid.add_row(warps, *map(duration, times), cost.sink, clock)
    out.print(grid)
    if any(cost.span_ns < 0 for cost in costs):
        note("below zero: the same loop happened to run slower without spans; short spans show the cost better")


def measure(backend: Backend) -> list[SpanCost]:
    """Measures all rows of the table."""
    from tracekern.record.overhead import WARPS_PER_SM, measure_span

    lengths = (125, 1250)
    if backend == "cpu":
        return [
            measure_span("cpu", record_format, 1, num_steps=steps, num_rounds=21)
            for record_format in ("span", "cycles")
            for steps in lengths
        ]
    return [
        measure_span("cuda", record_format, warps, sink, num_steps=steps, num_regions=500, num_rounds=31)
        for record_format, sink in (("span", "device"), ("span", "host"), ("cycles", "device"))
        for steps in lengths
        for warps in WARPS_PER_SM
    ]
