"""Which rank a process is under mpirun and srun, and what becomes of a rank that two processes claim."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tracekern.comm.ranks.group import Group
from tracekern.comm.ranks.launcher_environment import local_rank
from tracekern.dump.reader import peek_metadata
from tracekern.errors import BadInput
from tracekern.launcher.rendezvous import free_port
from tracekern.record.session import capture

SLURM_STEP = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}


def rank_in(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> tuple[int, int]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    group = Group.discover()
    return group.rank, group.num_ranks


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (1, 3)),
        ({"PMIX_RANK": "1"} | SLURM_STEP, (1, 2)),
        (SLURM_STEP, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"} | BATCH_SCRIPT, (1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"} | SLURM_STEP, (0, 1)),
        (BATCH_SCRIPT, (0, 1)),
        (SLURM_STEP | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, (0, 1)),
    ],
    ids=[
        "Open MPI",
        "MPICH",
        "PMIx",
        "srun",
        "mpirun in Slurm",
        "RANK comes first",
        "a batch script",
        "salloc's shell",
    ],
)
def test_a_launcher_tells_the_rank(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], wanted: tuple):
    assert rank_in(monkeypatch, environment) == wanted


def test_an_interactive_shell_of_several_tasks_is_one_process():
    """`srun -n 4 --pty bash`: three tasks have ended, and what is started by hand is no rank of four."""
    words = [sys.executable, "-c", "from tracekern.comm.ranks.group import Group; print(Group.discover().num_ranks)"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(words[0], words, os.environ | SLURM_STEP | {"SLURM_PROCID": "0"})
    said = b""
    try:
        while more := os.read(terminal, 1000):
            said += more
    except OSError:  # the terminal is gone with its process
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    assert said.strip() == b"1"


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"PMIX_RANK": "1"}, r"PMIX_RANK=1 of an unknown number of ranks; set RANK and WORLD_SIZE"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, r"PMI_RANK=2 PMI_SIZE=2: wanted a rank below a size; set RANK and WORLD"),
    ],
)
def test_a_launcher_that_tells_too_little_is_named(monkeypatch, environment: dict[str, str], told: str):
    with pytest.raises(BadInput, match=told):
        rank_in(monkeypatch, environment)


def test_the_local_rank_is_the_launchers(monkeypatch: pytest.MonkeyPatch):
    assert local_rank() == 0
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert local_rank() == 0, "not a task of srun"
    for name, value in SLURM_STEP.items():
        monkeypatch.setenv(name, value)
    assert local_rank() == 3
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "2")
    assert local_rank() == 2


def test_ranks_of_mpirun_that_cannot_meet_are_refused_and_told_what_to_set(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(BadInput) as refused, capture(tmp_path):
        pass
    assert str(refused.value) == (
        "rank 1 of 2 by environment alone: initialise torch.distributed before the capture, or start the ranks with "
        "tracekern's launcher; RANK=0 WORLD_SIZE=1 captures this process alone"
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with capture(tmp_path, device="cpu"):
        pass


def test_ranks_of_mpirun_meet_where_mpirun_says_who_they_are():
    program = "from tracekern.launcher.rendezvous import join_ranks; join_ranks(100.0)\n"
    program += "from tracekern.comm.ranks.group import Group; it = Group.discover(); print(it.rank, it.num_ranks)"
    port = str(free_port())
    mpirun = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, env=os.environ | mpirun, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "0 1\n"), ended.stderr


CLAIMS = """
import sys
from tracekern.errors import BadInput
from tracekern.record.session import capture
print("ready", flush=True)
for word in sys.stdin:
    try:
        with capture(sys.argv[1], device="cpu", clocks=False, max_bytes=1 << 20):
            if word == "stay\\n":
                print("open", flush=True)
                sys.stdin.readline()
        print("captured", flush=True)
    except BadInput as error:
        print(error, flush=True)
"""


class Process:
    """A process of a launcher that tells it nothing."""

    def __init__(self, directory: Path, *wrapper: str) -> None:
        words = [*wrapper, sys.executable, "-c", CLAIMS, str(directory)]
        self.popen = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout.readline() == "ready\n"

    def tell(self, word: str) -> str:
        self.popen.stdin.write(word + "\n")
        self.popen.stdin.flush()
        return self.popen.stdout.readline().strip()

    def end(self) -> None:
        self.popen.communicate()


@pytest.mark.parametrize("wrapper", [("sh", "-c", '"$@"; exit', "sh"), ("setsid",)], ids=["sh", "setsid"])
def test_two_processes_that_claim_one_rank_are_told_what_to_set(tmp_path: Path, wrapper: tuple[str, ...]):
    """Started by one shell, or in sessions of their own, as by ssh."""
    advice = "choose another directory, or set RANK and WORLD_SIZE where both are ranks of one run"
    directory, dump = tmp_path / "capture", tmp_path / "capture" / "rank_00000.tkdump"
    first, second = Process(directory), Process(directory, *wrapper)
    assert first.tell("stay") == "open"
    assert second.tell("capture").endswith(f"is writing its capture there; {advice}"), "at the same time"
    assert first.tell("") == "captured"
    run_id = peek_metadata(dump)["run_id"]
    assert second.tell("capture") == (
        f"{directory}: process {first.popen.pid} left rank 0 of 1 there while this one ran; {advice}"
    )
    assert peek_metadata(dump)["run_id"] == run_id
    assert first.tell("capture") == "captured", "its own it may replace"
    for process in (first, second):
        process.end()
    rerun = Process(directory)
    assert rerun.tell("capture") == "captured", "who starts his script again may replace what it left"
    with capture(directory, device="cpu"):  # a parent that ran all the time, and did not start ranks of one run
        pass
    assert peek_metadata(dump)["pid"] == os.getpid()
    rerun.end()
