"""Which rank this process is, as the environment of its launcher tells: torchrun's, that of an MPI, or Slurm's."""

from __future__ import annotations

import os

from tracekern.errors import BadInput

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Comes first, so that a user can correct what the others tell."""
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
_LAUNCHERS = (
    _TORCHRUN,
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH and Intel MPI
    _SLURM,
    ("PMIX_RANK", "", ""),  # of itself it tells no size
)
_INTERACTIVE_STEP = "4294967290"


def rank_and_size() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks; (0, 1) where no launcher tells.

    Raises:
        BadInput: The two do not fit together, or one is missing.
    """
    rank_name, size_name, _ = _launcher()
    rank, size = os.environ.get(rank_name, "0"), os.environ.get(size_name, "1")
    if not size_name:
        raise BadInput(f"{rank_name}={rank} of an unknown number of ranks; set RANK and WORLD_SIZE")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise BadInput(
            f"{rank_name}={rank} {size_name}={size}: wanted a rank below a size; set RANK and WORLD_SIZE, or neither"
        )
    return int(rank), int(size)


def local_rank() -> int:
    """Returns the number of this rank among those of its node; 0 where no launcher tells."""
    text = os.environ.get(_launcher()[2], "0")
    return int(text) if text.isdecimal() else 0


def _launcher() -> tuple[str, str, str]:
    """Returns the variables of rank, size and local rank of the launcher that started this process."""
    for names in _LAUNCHERS:
        if names is _SLURM and not _is_task_of_srun():
            if "SLURM_PROCID" in os.environ:
                break  # PMIx numbers the same tasks
        elif names[0] in os.environ:
            return names
    return _TORCHRUN


def _is_task_of_srun() -> bool:
    """Returns whether this is one of the processes that srun started, and not what a user started in its shell.

    A batch script and the shell of salloc have SLURM_PROCID=0 and may have SLURM_NTASKS, but are no tasks of a step. In
    `srun --pty bash`, too, a program is one process; only there does it have a terminal.
    """
    size, step = os.environ.get(_SLURM[1], ""), os.environ.get("SLURM_STEP_ID", "")
    return _SLURM[0] in os.environ and size not in ("", "1") and step != _INTERACTIVE_STEP and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
