"""`tracekern run moe` as a function: starts ranks that run tracekern.moe.workload.worker, and reads their reports."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tracekern.comm.devices.host_memory import num_out_of_memory, too_few_files
from tracekern.compiled import compiled
from tracekern.errors import BadInput, CommTimeout
from tracekern.launcher.workload import Lines
from tracekern.moe.workload.options import MoeRun
from tracekern.moe.workload.placement import Placement, place
from tracekern.moe.workload.reports import RankReport, RunReport
from tracekern.record.attempt_choice import next_attempt

if TYPE_CHECKING:
    from tracekern.launcher.launch import RankExit
    from tracekern.launcher.spawner import Spawner
    from tracekern.launcher.watch import Limits

WORKER = "tracekern.moe.workload.worker:main"
"""Function that each rank runs."""


def run(
    options: MoeRun,
    directory: str | Path,
    on_progress: Callable[[int, int], None] | None = None,
    on_start: Callable[[int, int], None] | None = None,
    spawner: Spawner | None = None,
) -> RunReport:
    """Runs the calls and leaves a capture in `directory` (unless options.trace is off).

    on_progress(done, total): called ten times a second with the calls that rank 0 has finished, including counted ones.
    on_start(rank, pid): called when a rank has started. spawner: of WORKER; runs that share one import torch only once.
    """
    if problem := too_few_files(options.ranks):
        raise BadInput(f"run moe {problem}")
    for name in options.compiled_parts:
        compiled(name)  # now: ranks that build it would be late
    capture_dir = Path(directory) if options.trace else None
    if capture_dir is not None:
        capture_dir = next_attempt(capture_dir)
        _make_directory(capture_dir)
    started, placement = time.monotonic(), place(options)
    report = _run_once(options, capture_dir, on_progress, on_start, spawner, placement.is_resident)
    if any(rank.has_no_room for rank in report.ranks):
        placement = Placement(False, next(rank.error for rank in report.ranks if rank.has_no_room))
        report = _run_once(options, capture_dir, on_progress, on_start, spawner, False)
    return dataclasses.replace(report, placement=placement.describe(options), wall_s=time.monotonic() - started)


def _run_once(
    options: MoeRun,
    capture_dir: Path | None,
    on_progress: Callable[[int, int], None] | None,
    on_start: Callable[[int, int], None] | None,
    spawner: Spawner | None,
    is_resident: bool,
) -> RunReport:
    from tracekern.launcher.launch import launch_ranks, new_run_id

    num_out_of_memory_before = num_out_of_memory()
    run_id, told = new_run_id(), Lines(RankReport, on_progress)
    exits = launch_ranks(
        options.ranks,
        spawner or WORKER,
        env={
            "TRACEKERN_MOE_RUN": json.dumps(dataclasses.asdict(options)),
            "TRACEKERN_MOE_CAPTURE": str(capture_dir or ""),
            **({} if is_resident else {"TRACEKERN_SIMULATED_CLOCK": simulated_clock(options.seed)}),
            "OMP_NUM_THREADS": "1",
            # Ranks that lose another one would print a stack; they raise the error anyway.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
        },
        capture_dir=capture_dir,
        on_line=told.take,
        on_start=on_start,
        limits=_limits(options),
        run_id=run_id,
        resident=is_resident,
    )
    out_of_memory = num_out_of_memory() > num_out_of_memory_before
    reports = [_report_of(ended, told.reports.get(ended.rank), out_of_memory) for ended in exits]
    reports = _find_followers(reports, {ended.rank for ended in exits if ended.stopped})
    return RunReport(
        options=options,
        ok=all(report.ok for report in reports),
        ranks=tuple(reports),
        wall_s=0.0,
        run_id=run_id,
        capture_dir=str(capture_dir or ""),
        errors=_explain(reports),
    )


def _limits(options: MoeRun) -> Limits:
    from tracekern.launcher.watch import Limits
    from tracekern.record.session import CLOSE_TIMEOUT_S

    limit_s = float(options.limit_s)
    return Limits(limit_s, limit_s, limit_s + options.timeout_ms / 1e3, limit_s + CLOSE_TIMEOUT_S, "--limit-s")


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "a file of that name is there" if isinstance(error, FileExistsError) else error.strerror
        raise BadInput(f"{path}: cannot be made a directory ({why}); choose another one") from None


def simulated_clock(seed: int) -> str:
    """Returns TRACEKERN_SIMULATED_CLOCK for a run; a value in the environment is kept."""
    return os.environ.get("TRACEKERN_SIMULATED_CLOCK", f"{seed + 1}:{time.clock_gettime_ns(time.CLOCK_MONOTONIC)}")


def _report_of(ended: RankExit, own: RankReport | None, out_of_memory: bool) -> RankReport:
    """Returns a rank's own report, or the launcher's. A rank that the launcher blames may still see its peers go."""
    if own is None:
        return _report_for(ended, out_of_memory)
    if own.followed and ended.late:
        return dataclasses.replace(own, error=ended.late, followed=False)
    return own


def _report_for(ended: RankExit, out_of_memory: bool) -> RankReport:
    """Returns the report of a rank that left none. out_of_memory: the kernel has killed some process for memory."""
    how = f"killed by signal {-ended.returncode}" if ended.returncode < 0 else f"exit status {ended.returncode}"
    advice = ""
    if out_of_memory and ended.returncode == -signal.SIGKILL:
        how, advice = "killed because memory ran out", "; take fewer ranks or tokens, or a smaller hidden"
    error = f"rank {ended.rank} ended ({how}) during {ended.phase}{advice}"
    if ended.stopped:
        error = ended.late or f"rank {ended.rank} was ended by the launcher during {ended.phase}"
    return RankReport(
        rank=ended.rank,
        ok=False,
        error=error,
        exit_code=min(ended.returncode, 0) or 2,
        followed=ended.stopped and not ended.late,
    )


def _find_followers(reports: list[RankReport], stopped: set[int]) -> list[RankReport]:
    """Marks the ranks that gave up on a rank that had ended by itself, or on one that had followed such a rank.

    stopped: the ranks that the launcher ended.
    """
    ended = {
        report.rank
        for report in reports
        if not (report.ok or report.followed or report.wrong_elements)
        and report.exit_code != CommTimeout.exit_code
        and report.rank not in stopped
    }
    gone = ended | {report.rank for report in reports if ended and report.followed}
    while more := {report.rank for report in reports if report.waited_for in gone} - gone:
        gone |= more
    return [dataclasses.replace(report, followed=True) if report.rank in gone - ended else report for report in reports]


def _explain(reports: list[RankReport]) -> tuple[str, ...]:
    """Returns the error lines of the ranks: those that only followed come last, and then those that were ended."""
    failed = [report for report in reports if not report.ok]
    in_order = sorted(failed, key=lambda report: (report.followed, report.followed and report.exit_code < 0))
    return tuple(report.error for report in in_order)
