"""How long does the analysis of a capture take, question by question, and how does it grow?

    python benchmarks/analysis.py
    python benchmarks/analysis.py --sizes 1 --rounds 1      # a quick look

Synthetic Timelines (analysis_timeline.py) of 1, 2, 5 and 10 M spans: 27 % of the spans are waits for messages, 3 % for
a block. Every size runs in a process of its own. Each question alone runs on one thread: judged are CPU seconds of the
fastest round, one question after the other, because other work on the machine touches wall seconds far more; both are
written. Waits, event graph and run graph are questions of their own; the others are given them. Memory is the peak of
the process while a question is answered, less what it held right before; what earlier questions left with the allocator
is used again and does not show, so the largest round counts, which is the first. Apart from that stands what the
process held before all questions: itself, the Timeline, its waits and both graphs. The last line is everything at
once, by the clock. Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Table, judged, measured_in_child, print_verdicts, resident_bytes, write_results

Measured = dict[str, Any]

REPORT = "all of a report"
"""Every question in one go and the page, as `tracekern report` makes it: two threads."""
MAX_SECONDS = 25.0
"""All questions together, at the largest size."""
MAX_GROWTH = 1.5
"""Seconds a span at the largest size, in those of the smallest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 2, 5, 10], help="in M spans")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", type=int, metavar="SPANS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child, arguments.rounds)))
        return
    load_before = os.getloadavg()[0]
    sizes = [measured_in_child(str(round(size * 1e6)), "--rounds", str(arguments.rounds)) for size in arguments.sizes]
    verdicts = judge(sizes)
    print_tables(sizes, verdicts)
    write_results("analysis", {"load_before": load_before, "sizes": sizes, "verdicts": verdicts})
    sys.exit(0 if all(verdict["met"] for verdict in verdicts) else 1)


def measure(num_spans: int, rounds: int) -> Measured:
    """All questions, in turns: a noisy machine hits all alike."""
    from analysis_timeline import make_timeline

    from tracekern.analysis.doubt import charge_ranks, most_charged
    from tracekern.analysis.findings import Findings, analyze
    from tracekern.analysis.graph.moments import Recorded, find_moments
    from tracekern.analysis.questions.balance import analyze_balance
    from tracekern.analysis.questions.imbalance import work_imbalance
    from tracekern.analysis.questions.stages import stage_times
    from tracekern.analysis.questions.summary import summarize
    from tracekern.analysis.questions.time_shares import share_time
    from tracekern.analysis.waits.analyze import analyze_waits
    from tracekern.analysis.waits.matrix import wait_matrix
    from tracekern.analysis.waits.statistics import wait_statistics
    from tracekern.analysis.why.answer import explain
    from tracekern.analysis.why.critical_path import critical_path
    from tracekern.timeline.facts.iterations import find_iterations
    from tracekern.viewers.report.report_page import report_page

    timeline = make_timeline(num_spans)
    findings, iterations = Findings(timeline), find_iterations(timeline)
    waits, recorded, moments, ended = findings.waits, findings.recorded, findings.moments, findings.sums["ended"]
    analyze(make_timeline(1))  # warms up
    questions: dict[str, Callable[[], Any]] = {
        "waits": lambda: analyze_waits(timeline),
        "statistics": lambda: wait_statistics(waits),
        "matrix": lambda: wait_matrix(timeline, waits),
        "event graph": lambda: Recorded.of(timeline, findings.parts),
        "run graph": lambda: find_moments(timeline, recorded),
        "causes": lambda: explain(timeline, moments, ended, iterations),
        "critical path": lambda: critical_path(timeline, moments),
        "balance": lambda: analyze_balance(timeline),
        "blame": lambda: most_charged(charge_ranks(timeline, waits)),
        "time shares": lambda: share_time(timeline),
        "stages": lambda: stage_times(timeline),
        "imbalance": lambda: work_imbalance(timeline),
        "summary": lambda: summarize(timeline),
        REPORT: lambda: report_page(analyze(timeline), "benchmark", "synthetic", ""),
    }
    gc.collect()
    timeline_bytes = resident_bytes("VmRSS")
    runs = [{name: timed(work) for name, work in questions.items()} for _ in range(rounds)]
    return {
        "spans": len(timeline.spans),
        "waits": len(waits),
        "late_waits": int((waits.late_ns > 0).sum()),
        "flows": len(timeline.flows),
        "timeline_bytes": timeline_bytes,
        "questions": {name: {key: [run[name][key] for run in runs] for key in runs[0][name]} for name in questions},
    }


def timed(work: Callable[[], Any]) -> dict[str, float]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = resident_bytes("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resident_bytes("VmHWM")
    return {"wall_s": wall, "cpu_s": cpu, "peak_bytes": peak - before, "process_peak_bytes": peak}


def seconds(size: Measured, name: str) -> float:
    return float(min(size["questions"][name]["cpu_s"]))


def report_seconds(size: Measured) -> float:
    """By the clock; the fastest round."""
    return float(min(size["questions"][REPORT]["wall_s"]))


def most_bytes(size: Measured) -> int:
    """The most that the process held at any time, everything in it."""
    return int(max(max(question["process_peak_bytes"]) for question in size["questions"].values()))


def total_seconds(size: Measured) -> float:
    return sum(seconds(size, name) for name in size["questions"] if name != REPORT)


def judge(sizes: list[Measured]) -> list[Measured]:
    last, first = sizes[-1], sizes[0]
    growth = (total_seconds(last) / last["spans"]) / (total_seconds(first) / first["spans"])
    rows = [
        (f"all questions, {last['spans'] / 1e6:.0f} M spans, CPU s", total_seconds(last), MAX_SECONDS),
        ("seconds a span, largest / smallest size", growth, MAX_GROWTH),
    ]
    return judged(rows)


def print_tables(sizes: list[Measured], verdicts: list[Measured]) -> None:
    table = Table("CPU seconds, fastest round", ["question", *(f"{size['spans'] / 1e6:.1f} M" for size in sizes)])
    for name in sizes[0]["questions"]:
        if name != REPORT:
            table.add(name, *(f"{seconds(size, name):.2f}" for size in sizes))
    table.add("one after the other", *(f"{total_seconds(size):.2f}" for size in sizes))
    table.add(f"{REPORT}, by the clock", *(f"{report_seconds(size):.2f}" for size in sizes))
    table.print()
    columns = ["question", *(f"{size['spans'] / 1e6:.1f} M" for size in sizes)]
    table = Table("peak memory beyond what was held right before, MB", columns)
    for name in sizes[0]["questions"]:
        table.add(name, *(f"{max(size['questions'][name]['peak_bytes']) / 1e6:.0f}" for size in sizes))
    table.add("held before all of them", *(f"{size['timeline_bytes'] / 1e6:.0f}" for size in sizes))
    table.add("most of the process", *(f"{most_bytes(size) / 1e6:.0f}" for size in sizes))
    table.print()
    print_verdicts(verdicts)


if __name__ == "__main__":
    main()
