"""`tracekern run fabric`: ranks that write pages to each other, again and again; every byte that arrives is checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tracekern.errors import BadInput, TracekernError
from tracekern.fabric.engine import TRACED_RECORDS
from tracekern.launcher.launch import RankExit, launch_ranks, new_run_id
from tracekern.launcher.watch import Limits
from tracekern.launcher.workload import Lines, flag
from tracekern.record.attempt_choice import next_attempt

WORKER = "tracekern.fabric.exchange_worker:main"
"""Function that each rank runs."""
OPTIONS, CAPTURE = "TRACEKERN_FABRIC_RUN", "TRACEKERN_FABRIC_CAPTURE"
"""Environment variables of the ranks: the fields of Exchange as JSON, and the capture's directory."""
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Exchange:
    """One run. Raises BadInput for values that cannot be used."""

    ranks: int = flag(2, "Ranks, processes of this host.")
    provider: str = flag("tcp", "tcp, on the loopback device, or shm.")
    domains: int = flag(1, "Interfaces that each rank uses side by side.")
    pages: int = flag(64, "Pages that each rank writes to each other, in an iteration.")
    page_kib: int = flag(64, "Size of a page.")
    iterations: int = flag(20, "Iterations, each behind a barrier.")
    late_rank: int = flag(-1, "A rank that submits late; -1: none.")
    late_us: int = flag(5000, "How much later it submits.")
    timeout_s: int = flag(20, "Longest wait for the writes of an iteration.")
    command: str = "tracekern run fabric"

    def __post_init__(self) -> None:
        if self.provider not in ("tcp", "shm"):
            raise BadInput(f"provider is {self.provider!r}; wanted tcp or shm, which need no network card")
        for name, value, low, high in (
            ("ranks", self.ranks, 2, 64),
            ("domains", self.domains, 1, 4),
            ("pages", self.pages, 1, 1 << 16),
            ("page-kib", self.page_kib, 1, 1 << 16),
            ("iterations", self.iterations, 1, 100_000),
            ("late-rank", self.late_rank, -1, self.ranks - 1),
            ("late-us", self.late_us, 0, 10_000_000),
            ("timeout-s", self.timeout_s, 1, 3600),
        ):
            if not low <= value <= high:
                raise BadInput(f"{name} is {value}; wanted {low} to {high}")
        if self.ranks * self.bytes_to_each > _MAX_BYTES:
            raise BadInput(
                f"pages is {self.pages}: {self.ranks * self.bytes_to_each:,} bytes of memory on each rank; wanted at "
                f"most {_MAX_BYTES:,}: take fewer pages, or smaller ones"
            )

    @property
    def records(self) -> int:
        """Room of each track of a traced rank: an arrival a page, as long as that is at most 64 MiB a track."""
        return min(max(TRACED_RECORDS, (self.iterations + 1) * (self.ranks - 1) * self.pages), 1 << 22)

    @property
    def page_bytes(self) -> int:
        return self.page_kib << 10

    @property
    def bytes_to_each(self) -> int:
        """That a rank writes to each other, in an iteration."""
        return self.pages * self.page_bytes


@dataclass(frozen=True)
class ExchangeReport:
    """What one rank says of the run."""

    rank: int
    error: str = ""
    exit_code: int = 0
    wrong_bytes: int = 0
    iteration_ms: tuple[float, ...] = ()
    """From the first submission to the last arrival."""

    @property
    def ok(self) -> bool:
        return not self.error


def run_exchange(
    options: Exchange, directory: Path | None, on_progress: Callable[[int, int], None] | None = None
) -> tuple[list[ExchangeReport], Path | None]:
    """Runs the ranks. Returns their reports, and where the capture is.

    on_progress(done, total): called with the iterations that rank 0 has finished.
    """
    capture_dir = None if directory is None else next_attempt(directory)
    told = Lines(ExchangeReport, on_progress)
    exits = launch_ranks(
        options.ranks,
        WORKER,
        env={
            OPTIONS: json.dumps(dataclasses.asdict(options)),
            CAPTURE: str(capture_dir or ""),
            "TORCH_CPP_LOG_LEVEL": "FATAL",  # ranks that lose another one would print a stack
        },
        capture_dir=capture_dir,
        on_line=told.take,
        limits=Limits(run_s=60.0 + options.timeout_s, raised_by="--timeout-s"),
        run_id=new_run_id(),
    )
    return [told.reports.get(ended.rank) or _report_of(ended) for ended in exits], capture_dir


def _report_of(ended: RankExit) -> ExchangeReport:
    """Returns the report of a rank that left none."""
    how = ended.signal_name or f"exit status {ended.returncode}"
    return ExchangeReport(ended.rank, ended.late or f"rank {ended.rank} ended ({how}) during {ended.phase}", 2)


def raise_for_error(reports: list[ExchangeReport]) -> None:
    """Raises an error with the lines of the ranks that failed, those first that others did not wait for."""
    failed = sorted((report for report in reports if not report.ok), key=lambda report: report.exit_code == 3)
    if failed:
        error = TracekernError("; ".join(report.error for report in failed))
        error.exit_code = failed[0].exit_code
        raise error
