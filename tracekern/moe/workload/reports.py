"""What each rank of `tracekern run moe` reports, and the report of the whole run."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from tracekern.errors import CommTimeout, TracekernError
from tracekern.formatting import count, first_of_each
from tracekern.moe.workload.options import MoeRun


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
    """How long the wires between the GPUs take at least for a call (tracekern/moe/calls/wire.py); 0: there are none."""
    footprint_bytes: int = 0
    """Bytes of the rank's profile buffers."""
    sweep: tuple[dict[str, Any], ...] = ()
    """Choices of blocks and their times, the same on all ranks: the fields of tracekern.moe.workload.sweep.Choice."""
    has_no_room: bool = False
    """Whether it could not be resident beside the others."""


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
