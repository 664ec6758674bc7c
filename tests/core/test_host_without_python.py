"""Ranks without Python, examples/mpi, record by tracekern_host.h; Python packs and reads it afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.toolchains import CSRC, GXX, NVCC, ROOT, compile_cached
from tracekern import _core
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.segment.names import SHM_DIR, has_owner, list_segments
from tracekern.segment.salvage import salvage_run
from tracekern.segment.view import SegmentView
from tracekern.timeline.load import load

EXAMPLE = ROOT / "examples" / "mpi"
HOST = CSRC / "tracekern_host.cpp"
WARNED = ("-Wall", "-Wextra", "-Werror", "-pedantic")


@pytest.fixture(scope="module")
def program() -> Path:
    """The compiled example. Its half of tracekern is C++17."""
    host = compile_cached(("g++", "-std=c++17", "-O1", *WARNED, "-c"), HOST, ".o")
    return compile_cached((*GXX, "-O1", str(host)), EXAMPLE / "ring_host.cpp", "")


@pytest.fixture
def run_id():
    name = f"host-{uuid.uuid4().hex}"
    yield name
    for left in list_segments(name):
        SegmentView.attach(left).unlink()


def start(program: Path, run_id: str, *options: object, rank: str = "RANK=0 WORLD_SIZE=1") -> subprocess.Popen[str]:
    environment = os.environ | {"RING_RUN": run_id} | dict(word.split("=") for word in rank.split())
    words = [str(program), *map(str, options)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err


def test_a_slow_rank_is_named_by_what_hosts_without_python_left(tmp_path, program, command_line):
    directory = tmp_path / "ring"
    command = [EXAMPLE / "start.sh", "2", program, "--slow", "1", "--timeout", "60", "-o", directory]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank \d received all", done.stdout)) == ["rank 0 received all", "rank 1 received all"]
    run_id = re.search(r"tracekern salvage (\S+)", done.stdout)[1]
    told = command_line("salvage", run_id)
    assert (told.returncode, told.stdout) == (0, f"run {run_id}: saved ranks 0 and 1 of 2\n"), told.stderr
    assert list_segments(run_id) == []
    timeline = load(directory)
    assert timeline.problems == ()
    report = json.loads(command_line("report", directory, "--json").stdout)
    named = r"rank 1's ring of 12 slots \(channel credit, the fullest of 2\) is full [\d.]+ % of the time of rank 0's"
    assert re.search(named, report["waiting"]), report["waiting"]
    tails = timeline.rows_of("signal_tail")
    served = timeline.flows.wait[np.isin(timeline.flows.signal, tails)]
    assert len(served) == 2 * 4 * 2 * 2 * 25  # ranks, calls, channels, warps, chunks taken
    dump = read_dump(directory / "rank_00001.tkdump")
    about = {"state": "closed", "rank": 1, "num_ranks": 2, "backend": "cpu", "role_tables": [["send", "receive"]]}
    assert about.items() <= dump.metadata.items()
    assert dump.metadata["clock"]["shift"] == _core.clock_shift
    assert [(launch.name, launch.sequence, launch.epoch) for launch in dump.launches] == [
        ("ring", sequence, 1) for sequence in range(4)
    ]
    samples = dump.clock_samples()
    assert Counter(samples["round_idx"].tolist()) == {0: 50, 1: 50}
    assert np.all(samples["t0"] <= samples["t3"])


def test_rings_of_some_of_the_ranks_are_named_by_their_ranks_in_the_run(tmp_path, program, command_line):
    directory = tmp_path / "rings"
    command = [EXAMPLE / "start.sh", "4", program, "--rings", "2", "--timeout", "60", "-o", directory]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = command_line("salvage", re.search(r"tracekern salvage (\S+)", done.stdout)[1])
    assert told.returncode == 0, told.stderr
    timeline = load(directory)
    assert timeline.problems == ()
    rank = timeline.track_ranks()[timeline.spans.track]
    pairs = {*zip(rank[timeline.flows.signal].tolist(), rank[timeline.flows.wait].tolist(), strict=True)}
    assert {pair for pair in pairs if pair[0] != pair[1]} == {(0, 2), (2, 0), (1, 3), (3, 1)}
    members = {(launch.rank, launch.members.name, launch.members.ranks) for launch in timeline.launches}
    assert members == {(rank, f"ring {rank % 2}", (rank % 2, rank % 2 + 2)) for rank in range(4)}
    assert sorted(launch.sequence for launch in timeline.launches) == sorted([*range(4)] * 4)


def test_a_rank_of_a_ring_that_does_not_come_is_named_by_its_rank_in_the_run(tmp_path, program, run_id):
    options = ("--rings", 2, "--slow", 3, "--calls", 10_000, "--timeout", 1, "-o", tmp_path / "ring")
    ranks = [start(program, run_id, *options, rank=f"RANK={rank} WORLD_SIZE=4") for rank in range(4)]
    time.sleep(1.0)
    ranks[3].send_signal(signal.SIGKILL)
    said = [ended(rank) for rank in ranks[1::2]]
    for rank in ranks[::2]:
        rank.kill()
        ended(rank)
    # A rank in the barrier at the end of a call waits for all, at a counter of its own.
    gave_up = re.fullmatch(r"rank 1: call \d+ gave up on rank ([13])\n", said[0][1])
    assert gave_up, said
    salvage_run(run_id)
    fault = read_dump(tmp_path / "ring" / "rank_00001.tkdump").metadata["fault_text"]
    wanted = rf"rank 1 ring of ring 1 block \d+ warp \d+ gave up on rank {gave_up[1]} after 1.\d+ s"
    assert re.match(wanted, fault), fault


def test_a_rank_that_is_killed_leaves_what_it_had_recorded(tmp_path, program, run_id, command_line):
    options = ("--slow", 1, "--calls", 10_000, "--timeout", 5, "-o", tmp_path / "ring")
    ranks = [start(program, run_id, *options, rank=f"RANK={rank} WORLD_SIZE=2") for rank in range(2)]
    name = f"tracekern-{run_id}-1"
    give_up = time.monotonic() + 60
    num_launches = 0
    while num_launches < 3 and time.monotonic() < give_up:
        time.sleep(0.02)
        try:
            segment = SegmentView.attach(name)
        except BadInput:  # it has yet to be made
            continue
        num_launches = int(segment.header["num_launches"])
        segment.close()
    assert has_owner(name)
    assert (SHM_DIR / name).stat().st_blocks * 512 < 16 << 20, "of max_bytes only what is needed"
    ranks[1].send_signal(signal.SIGKILL)
    assert ended(ranks[1])[0] == -signal.SIGKILL
    code, told = ended(ranks[0])
    assert code == 2
    # A rank in the barrier at the end of a call waits for all, at a counter of its own.
    gave_up = re.fullmatch(r"rank 0: call \d+ gave up on rank ([01])\n", told)
    assert gave_up, told
    assert not has_owner(name)
    assert salvage_run(run_id) == {1}
    states = [read_dump(path).metadata["state"] for path in sorted((tmp_path / "ring").glob("*.tkdump"))]
    assert states == ["closed", "salvaged"]
    report = json.loads(command_line("report", tmp_path / "ring", "--json").stdout)
    assert "rank 1 died" in report["trust"]
    assert report["fault"].startswith("rank 0 ring block "), report["fault"]
    assert f"gave up on rank {gave_up[1]} after 5" in report["fault"]


def test_what_finds_no_room_is_counted(tmp_path, program, run_id):
    options = ("--calls", 520, "--timeout", 60, "-o", tmp_path)
    alone = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1"
    assert ended(start(program, run_id, *options, rank=alone)) == (0, "rank 0 received all that was sent to it\n")
    salvage_run(run_id)
    dump = read_dump(tmp_path / "rank_00000.tkdump")
    refused = 520 - len(dump.launches)
    assert dump.metadata["launches_refused"] == refused > 0
    enough = rf"{refused} launches ran unrecorded; max_bytes=(\d+) would have been enough"
    said = re.fullmatch(enough, dump.metadata["refused_text"])
    assert int(said[1]) > 64 << 20


def test_who_cannot_record_is_told_why(tmp_path, program, run_id):
    def refusal(name: str, rank: str = "RANK=0 WORLD_SIZE=1") -> str:
        code, told = ended(start(program, name, "-o", tmp_path, rank=rank))
        assert code == 2
        return told

    assert ended(start(program, run_id, "-o", tmp_path))[0] == 0
    there = f"tk_host_open: /dev/shm/tracekern-{run_id}-0: File exists; each run needs a name that none had before\n"
    assert refusal(run_id) == "rank 0: " + there
    salvage_run(run_id)
    other = f"{tmp_path}: has a rank_00000.tkdump of another run; choose another directory, or remove this one\n"
    assert refusal(f"{run_id}2") == "rank 0: tk_host_open: " + other
    ranks = [start(program, f"{run_id}2", "-o", tmp_path, rank=f"RANK={rank} WORLD_SIZE=2") for rank in range(2)]
    assert [ended(rank)[1] for rank in ranks] == [f"rank {rank}: tk_host_open: {other}" for rank in range(2)]
    assert refusal("a.b") == "rank 0: tk_host_open: run \"a.b\"; wanted at most 200 letters, digits, '-' and '_'\n"
    assert list_segments(f"{run_id}2") == []
    beyond = refusal(run_id, "RANK=2 WORLD_SIZE=2")
    assert beyond == "ring_host: RANK=2 WORLD_SIZE=2: wanted a rank below a number of at most 64\n"
    unset = {"RANK": "0", "WORLD_SIZE": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run([program], env=unset, capture_output=True, text=True)
    assert "RING_RUN is not set" in done.stderr


def test_the_header_is_c(tmp_path):
    (tmp_path / "host.c").write_text(
        '#include "tracekern_host.h"\nuint64_t trace(void) { return tk_host_launch(0, 0, 0); }\n'
    )
    compile_cached(("gcc", "-std=c99", *WARNED, "-c"), tmp_path / "host.c", ".o")


@pytest.mark.programs("examples/mpi/ring_host.cpp", "csrc/tracekern_host.cpp", rotates=False)
@pytest.mark.compilers
def test_the_example_compiles_for_gpus():
    compile_cached((*NVCC, "-x", "cu", "-ptx"), EXAMPLE / "ring_host.cpp", ".ptx")
    compile_cached((*NVCC, "-x", "cu", "-ptx"), HOST, ".ptx")
