"""What `run moe --sweep-blocks` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekern.cli.output import console, table
from tracekern.formatting import count, duration

if TYPE_CHECKING:
    from tracekern.moe.workload.options import MoeRun
    from tracekern.moe.workload.reports import RankReport


def print_sweep(plan: MoeRun, report: RankReport) -> None:
    """Prints a row for each kernel and number of blocks, and which choice has the fastest calls."""
    choices = report.sweep  # the usual numbers come first
    out, usual = console(), choices[0]
    grid = table(["blocks", "kernel takes", "call takes"], ["kernel", ""])
    for kernel in dict.fromkeys(choice["kernel"] for choice in choices if choice["kernel"]):
        of_kernel = [usual, *(choice for choice in choices if choice["kernel"] == kernel)]
        fastest = min((choice for choice in of_kernel if not choice["problem"]), key=_call_us)
        for choice in sorted(of_kernel, key=lambda choice: choice["blocks"][kernel]):
            about = [choice["problem"]] if choice["problem"] else []
            about += ["usual"] * (choice is usual) + ["fastest call"] * (choice is fastest)
            kernel_us = choice["kernel_us"].get(kernel, 0.0)
            times = [duration(us * 1e3) if us else "-" for us in (kernel_us, choice["call_us"])]
            grid.add_row(f"{choice['blocks'][kernel]:,}", *times, kernel, ", ".join(about))
    out.print(grid)
    out.print(
        f"medians of {count(plan.iterations, 'call')} on the slowest rank; the other kernels have their usual blocks",
        soft_wrap=True,
    )
    ran = [choice for choice in choices if not choice["problem"]]
    best, last = min(ran, key=_call_us), choices[-1]
    told = f"a call takes {_call(usual)} as it is, {_call(best)} with {_option(plan, usual, best)}"
    if best is usual:
        told = f"a call takes {_call(usual)} as it is, and no other number of blocks makes it faster"
    if not last["kernel"] and last is not usual and last is not best and not last["problem"]:
        told += f"; {_call(last)} with the fastest of each, {_option(plan, usual, last)}"
    out.print(told, soft_wrap=True)
    if report.backend == "cpu":
        out.print("CPU backend: these durations say nothing about a GPU")


def _call_us(choice: dict[str, Any]) -> float:
    return float(choice["call_us"])


def _call(choice: dict[str, Any]) -> str:
    return duration(choice["call_us"] * 1e3)


def _option(plan: MoeRun, usual: dict[str, Any], choice: dict[str, Any]) -> str:
    """The option that asks for these numbers."""
    from tracekern.moe.families import FAMILY_OF
    from tracekern.moe.family import blocks_by_stage

    asked = blocks_by_stage(FAMILY_OF[plan.variant].variants[plan.variant], plan.stage_blocks)
    changed = [
        f"{kernel}={number}"
        for kernel, number in choice["blocks"].items()
        if kernel in asked or number != usual["blocks"][kernel]
    ]
    return f"--blocks {','.join([*([str(plan.blocks)] if plan.blocks else []), *changed])}"
