"""Where the ranks of a run go: on a GPU each, all resident on one, in turns on a few, or on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

from tracekern.comm.ranks.resident import MAX_RESIDENTS
from tracekern.moe.workload.options import MoeRun


@dataclass(frozen=True)
class Placement:
    is_resident: bool
    why_not: str = ""
    """Why ranks that share GPUs are not resident; "" if they are, or share none."""

    def describe(self, options: MoeRun) -> str:
        """Returns what a user is told of it; "" if no rank shares a GPU."""
        if self.is_resident:
            return f"{options.ranks} ranks resident on one GPU"
        if not self.why_not:
            return ""
        instead = "they take turns" if options.backend == "cuda" else "they run on the CPU"
        return f"the ranks cannot be resident on one GPU, so {instead}: {self.why_not}"


def place(options: MoeRun) -> Placement:
    """Returns where ranks go, as far as that is known before they start: whether they have room only they find out."""
    if options.is_for_cpu or not 0 < _count_gpus() < options.ranks:
        return Placement(False)
    why_not = ""
    if options.ranks > MAX_RESIDENTS:
        why_not = f"{options.ranks} ranks, at most {MAX_RESIDENTS} can be"
    elif options.torch_profiler:
        why_not = "torch.profiler would record all of them as one"
    return Placement(not why_not, why_not)


def _count_gpus() -> int:
    try:
        from tracekern import _cuda
    except ImportError:  # built without kernels for GPUs
        return 0
    return int(_cuda.count_devices())
