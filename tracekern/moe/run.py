"""`tracekern run moe` as a function: starts ranks that run tracekern.moe.worker, and reads their reports."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekern.comm.group import MAX_HEAP_RANKS
from tracekern.comm.host_memory import num_out_of_memory, too_few_files
from tracekern.errors import BadInput, CommTimeout, TracekernError
from tracekern.formatting import count, first_of_each
from tracekern.moe.experts import Experts, draw_experts
from tracekern.moe.families import FAMILY_OF, VARIANTS, all_options, takes_option
from tracekern.moe.family import blocks_by_stage
from tracekern.moe.gemm.experts import EXPERTS, draw_int4_experts
from tracekern.moe.gemm.experts import why_unsuitable as why_no_int4_experts
from tracekern.moe.gemm.kernels import MAX_DETAIL
from tracekern.moe.placement import Placement, place
from tracekern.moe.routing import ROUTINGS
from tracekern.moe.shape import MAX_EXPERTS, MAX_TOKENS, MoeShape, check_range
from tracekern.record.setup import next_attempt

if TYPE_CHECKING:
    from tracekern.launcher.launch import RankExit
    from tracekern.launcher.spawner import Spawner
    from tracekern.launcher.watch import Limits

WORKER = "tracekern.moe.worker:main"
"""Function that each rank runs."""


class UnsuitableShape(BadInput):
    """The shape is one that the variant does not take, and others may."""


@dataclass(frozen=True)
class MoeRun:
    """One run: `iterations` calls of a variant on `ranks` ranks, each checked bit by bit.

    Raises BadInput for values that cannot be used.
    """

    ranks: int = 8
    variant: str = "balanced"
    tokens: int = 64
    """Most tokens of a rank."""
    hidden: int = 2048
    experts: int = 64
    topk: int = 6
    dtype: str = "bf16"
    expert: str = "scale"
    """What an expert makes of a row: "scale" multiplies it by a number, "int4_sparse" is a network."""
    intermediate: int = 256
    """Size between the two weights of an int4 expert."""
    routing: str = "zipf"
    uneven: bool = True
    iterations: int = 3
    seed: int = 7
    trace: bool = True
    timeout_ms: int = 20_000
    records_per_track: int | str = "auto"
    keep: str = "first"
    """"first" or "last" records of a full track stay."""
    clock: str = "realtime"
    """Where records get their times: "realtime" or "cycles"."""
    detail: int | str = 0
    """Of every how many-th tile of int4 experts each step is recorded; 0: of none. "all": of every one, and how warps
    wait that have nothing to do."""
    every: int = 1
    blocks: int = 0
    """Blocks of a kernel; 0: 4 on the CPU, on a GPU all SMs but 4."""
    stage_blocks: dict[str, int] = field(default_factory=dict)
    """Blocks of kernels that have another number of them, by the names of blocks_by_stage()."""
    sweep_blocks: bool = False
    """Whether to time calls with other numbers of blocks, kernel by kernel (tracekern/moe/sweep.py)."""
    warps: int = 0
    """Warps of a block; 0: 4 on the CPU, 16 on a GPU."""
    family_options: dict[str, int] = field(default_factory=dict)
    """Options that only the variant's family has, such as the partitions of `pipelined`; 0 leaves the choice to it."""
    late_rank: int = -1
    """A rank whose calls begin `late_us` later than its host starts them, to see how the others wait; -1: none."""
    late_us: int = 300
    torch_profiler: bool = False
    host_driven: bool | None = None
    """Whether the host starts each call after the one before has ended. Else all calls are back to back on the device,
    behind a barrier of the ranks each. None: on the CPU backend, whose kernels run on the host."""
    backend: str = "auto"
    limit_s: int = 60
    """Longest time without progress in a phase (tracekern/launcher/watch.py), in addition to what kernels may wait."""
    command: str = "tracekern run moe"
    """Command line stored with the capture."""

    def __post_init__(self) -> None:
        for name, value, wanted in (
            ("variant", self.variant, VARIANTS),
            ("routing", self.routing, ROUTINGS),
            ("expert", self.expert, EXPERTS),
            ("backend", self.backend, ("auto", "cpu", "cuda")),
            ("keep", self.keep, ("first", "last")),
            ("clock", self.clock, ("realtime", "cycles")),
        ):
            if value not in wanted:
                raise BadInput(f"{name} is {value!r}; wanted one of {', '.join(wanted)}")
        if self.backend == "cuda" and self.variant not in FAMILY_OF:
            raise BadInput(f"variant {self.variant} runs on the CPU only; on GPUs take one of {', '.join(FAMILY_OF)}")
        for name, value, low, high in (
            ("ranks", self.ranks, 1, MAX_HEAP_RANKS),
            ("tokens", self.tokens, 1, MAX_TOKENS),
            ("experts", self.experts, 1, MAX_EXPERTS),
            ("iterations", self.iterations, 1, 1_000_000),
            ("intermediate", self.intermediate, 1, 1 << 20),
            ("seed", self.seed, 0, (1 << 63) - 1),
            ("timeout-ms", self.timeout_ms, 1, 3_600_000),
            ("detail", self.tile_detail, 0, MAX_DETAIL),
            ("every", self.every, 1, 1_000_000),
            ("blocks", self.blocks, 0, 1024),
            ("warps", self.warps, 0, 32),
            ("limit-s", self.limit_s, 1, 1_000_000),
            ("late-rank", self.late_rank, -1, self.ranks - 1),
            ("late-us", self.late_us, 0, 1_000_000),
        ):
            check_range(name, value, low, high)
        if self.host_driven is False and self.variant not in FAMILY_OF:
            raise BadInput(f"device-driven: variant {self.variant} has no kernels to queue; leave it out")
        if self.late_rank >= 0 and self.variant not in FAMILY_OF:
            raise BadInput(f"late-rank is {self.late_rank}; variant {self.variant} has no kernels that could be late")
        check_family_options(self.variant, self.family_options)
        if self.variant in FAMILY_OF and (
            why := FAMILY_OF[self.variant].why_unsuitable(self.shape, self.family_options)
        ):
            raise UnsuitableShape(why)
        self._check_stage_blocks()
        if self.detail not in (0, "all") and not self.has_int4_experts:
            raise BadInput(f"detail is {self.detail}; expert {self.expert} has no steps, int4_sparse has")
        if self.clock == "cycles" and self.keep == "last":
            raise BadInput("clock is cycles; a flight recorder, keep last, has the realtime clock alone")
        kernels = {variant: family.variants[variant] for variant, family in FAMILY_OF.items()}
        if self.has_int4_experts and (why := why_no_int4_experts(self.variant, kernels, self.shape, self.intermediate)):
            raise UnsuitableShape(why)
        records = self.records_per_track
        if records != "auto" and (not isinstance(records, int) or not 1 <= records <= 1 << 24):
            raise BadInput(f"records-per-track is {records}; wanted auto or 1 to {1 << 24}")
        _ = self.shape

    def _check_stage_blocks(self) -> None:
        if self.sweep_blocks and self.trace:
            raise BadInput("sweep-blocks times calls that are not recorded; wanted trace=False")
        if self.sweep_blocks and self.host_driven:
            raise BadInput("sweep-blocks times calls that are queued back to back; leave host-driven out")
        if not self.stage_blocks and not self.sweep_blocks:
            return
        for name, blocks in self.stage_blocks.items():
            check_range(f"blocks of {name}", blocks, 1, 1024)
        family = FAMILY_OF.get(self.variant)
        if family is None or not family.takes_stage_blocks:
            asked = f"blocks of {next(iter(self.stage_blocks))}:" if self.stage_blocks else "sweep-blocks is on;"
            raise UnsuitableShape(f"{asked} variant {self.variant} has no such choice")
        try:
            blocks_by_stage(family.variants[self.variant], self.stage_blocks)
        except BadInput as error:
            raise UnsuitableShape(str(error)) from None

    @property
    def shape(self) -> MoeShape:
        return MoeShape(self.ranks, self.tokens, self.experts, self.topk, self.hidden, self.dtype)

    @property
    def has_int4_experts(self) -> bool:
        return self.expert == "int4_sparse"

    @property
    def tile_detail(self) -> int:
        return 1 if self.detail == "all" else int(self.detail)

    def draw_experts(self) -> Experts:
        """Returns the experts of all ranks."""
        if self.has_int4_experts:
            return draw_int4_experts(self.shape, self.intermediate, self.tile_detail)
        return draw_experts(self.shape)

    @property
    def workload(self) -> dict[str, Any]:
        """Returns the settings for the capture: the options that determine the work of a call.

        The gate compares only runs with equal settings. Ranks, calls and grids are stored elsewhere in a capture; how
        it was run or recorded does not change the work. Options of a family belong here if the variant uses them.
        """
        names = ["variant", "tokens", "hidden", "experts", "topk", "dtype", "routing", "uneven", "seed"]
        settings = {name: getattr(self, name) for name in names}
        if self.has_int4_experts:
            settings |= {"expert": self.expert, "intermediate": self.intermediate}
        if self.late_rank >= 0:
            settings |= {"late_rank": self.late_rank, "late_us": self.late_us}
        options = FAMILY_OF[self.variant].options_of(self.variant) if self.variant in FAMILY_OF else []
        chosen = {option.name: option.setting(self.family_options.get(option.name, 0)) for option in options}
        return settings | {name: value for name, value in chosen.items() if value}


@dataclass(frozen=True)
class RankReport:
    """Report of one rank on its run."""

    rank: int
    ok: bool
    error: str = ""
    """One line; empty if nothing went wrong."""
    exit_code: int = 0
    """Exit status; minus the signal's number if a signal ended the rank."""
    followed: bool = False
    """Whether it stopped waiting only because another rank had given up or ended."""
    waited_for: int = -1
    """Rank that a kernel of this rank waited for when it gave up; -1 if none did."""
    wrong_elements: int = 0
    """Elements of all results that differ from what the variant promises in any bit; see reference_name."""
    num_checked: int = 0
    """Calls whose results were compared, the last ones."""
    tokens: int = 0
    """Tokens of all iterations."""
    backend: str = ""
    """Where its kernels ran: "cpu" or "cuda"."""
    family_options: dict[str, int] = field(default_factory=dict)
    """Options that the variant takes, with the values that were used."""
    iteration_ms: tuple[float, ...] = ()
    """Time of each call: of the host, or with calls back to back of the device, from the barrier in front of it."""
    is_host_driven: bool = True
    least_call_us: float = 0.0
    """How long the wires between the GPUs take at least for a call (tracekern/moe/wire.py); 0: there are none."""
    footprint_bytes: int = 0
    """Bytes of the rank's profile buffers."""
    sweep: tuple[dict[str, Any], ...] = ()
    """Choices of blocks and their times, the same on all ranks: the fields of tracekern.moe.sweep.Choice."""
    has_no_room: bool = False
    """Whether it could not be resident beside the others."""

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        values = json.loads(text)
        return cls(**{**values, "iteration_ms": tuple(values["iteration_ms"]), "sweep": tuple(values["sweep"])})


@dataclass(frozen=True)
class RunReport:
    """Result of a run. `ok` only if every rank succeeded and every result equals the variant's reference."""

    options: MoeRun
    ok: bool
    ranks: tuple[RankReport, ...]
    wall_s: float
    run_id: str = ""
    """The run as its captures name it."""
    capture_dir: str = ""
    placement: str = ""
    """How ranks share GPUs; "" if none does."""
    errors: tuple[str, ...] = field(default=())

    @property
    def was_interrupted(self) -> bool:
        """Returns whether Ctrl-C ended a rank."""
        return any(report.exit_code == -signal.SIGINT for report in self.ranks)

    def raise_for_error(self) -> None:
        """Raises the error that explains the failure best; CommTimeout if a wait timed out.

        Raises KeyboardInterrupt if Ctrl-C ended a rank.
        """
        if self.ok:
            return
        if self.was_interrupted:
            raise KeyboardInterrupt
        own = [report for report in self.ranks if not (report.ok or report.followed)]
        told = [report.error for report in own] or list(self.errors[:1])
        stopped = len(self.errors) - len(told)
        followed = [f"{count(stopped, 'more rank')} stopped"] if stopped else []
        text = "; ".join([*first_of_each(dict.fromkeys(told)), *followed])
        text = text or "a rank failed without a message"
        timed_out = any(report.exit_code == CommTimeout.exit_code for report in own or self.ranks)
        raise (CommTimeout if timed_out else TracekernError)(text)


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
    run_id, told = new_run_id(), _Lines(on_progress)
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
    return Limits(limit_s, limit_s, limit_s + options.timeout_ms / 1e3, limit_s + CLOSE_TIMEOUT_S)


class _Lines:
    """Takes the lines of the ranks: progress, reports, and what else they print, which goes to standard error."""

    def __init__(self, on_progress: Callable[[int, int], None] | None) -> None:
        self._on_progress = on_progress
        self.reports: dict[int, RankReport] = {}

    def take(self, rank: int, line: str) -> None:
        if line.startswith(PROGRESS):
            done, total = line[len(PROGRESS) :].split()
            if rank == 0 and self._on_progress:
                self._on_progress(int(done), int(total))
        elif line.startswith(REPORT):
            report = RankReport.from_json(line[len(REPORT) :])
            self.reports[report.rank] = report
        else:
            sys.stderr.write(f"[rank {rank}] {line}\n")


def check_family_options(variant: str, options: dict[str, int]) -> None:
    """Raises BadInput for an option that the variant does not take, or for an invalid value."""
    for name, value in options.items():
        of_name = [option for option in all_options() if option.name == name]
        if not of_name:
            known = ", ".join(option.name for option in all_options())
            raise BadInput(f"option is {name!r}; wanted one of {known}")
        check_range(name, value, 0, of_name[0].high)
        if value and not takes_option(variant, name):
            takers = ", ".join(of_name[0].variants)
            raise BadInput(f"{name} is {of_name[0].setting(value)}; variant {variant} has none, only {takers} has")


def reference_name(variant: str) -> str:
    """Returns the name of the plain torch function whose result this variant promises bit by bit."""
    return FAMILY_OF[variant].reference_name(variant) if variant in FAMILY_OF else "reference"


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "a file of that name is there" if isinstance(error, FileExistsError) else error.strerror
        raise BadInput(f"{path}: cannot be made a directory ({why}); choose another one") from None


PROGRESS = "tracekern-progress "
"""Prefix of a worker's line with the number of finished calls and of all calls."""
REPORT = "tracekern-report "
"""Prefix of a worker's last line, its RankReport."""


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
