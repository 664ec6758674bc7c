"""`tracekern run moe` as a user types it: small shapes, whole path from kernels to the trace."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli import refused

from tests.paths import ROOT
from tracekern.cli.commands.run_moe import _plans_of_all
from tracekern.dump.format import SEGMENT_MAGIC
from tracekern.moe.families import PLAIN_VARIANTS, VARIANTS

SMALL = ("--ranks", 4, "--tokens", 12, "--hidden", 96, "--experts", 8, "--topk", 3, "--iterations", 2)
TOPK = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory, command_line) -> tuple[Path, dict]:
    """A traced run: its directory and what --json said."""
    directory = tmp_path_factory.mktemp("run")
    result = command_line("run", "moe", *SMALL, "-o", directory, "--json")
    assert result.returncode == 0, result.stderr
    return directory, json.loads(result.stdout)


def test_a_run_leaves_capture_and_trace(finished):
    directory, said = finished
    assert {path.name for path in directory.iterdir()} >= {"capture.json", "rank_00000.tkdump", "trace.pftrace.gz"}
    (run,) = said["runs"]
    assert said["ok"] is True
    assert run["trace"] == str(directory / "trace.pftrace.gz")
    assert run["options"]["variant"] == "balanced"
    assert [rank["wrong_elements"] for rank in run["ranks"]] == [0, 0, 0, 0]


def test_the_kernels_sent_what_the_tokens_demand(finished):
    (run,) = finished[1]["runs"]
    wanted = sum(rank["tokens"] for rank in run["ranks"]) * TOPK
    counts = {"copy_token": 0, "receive_token": 0}
    for rank in run["summary"]["ranks"]:
        for event in rank["events"]:
            if event["event"] in counts:
                counts[event["event"]] += event["count"]
    assert counts == {"copy_token": wanted, "receive_token": wanted}


def test_clocks_are_bounded(finished):
    (run,) = finished[1]["runs"]
    clocks = [(rank["clock_method"], rank["clock_hard_ns"]) for rank in run["summary"]["ranks"]]
    assert clocks[0] == ("reference", 0.0)
    assert all(method == "ping-pong" and 0 < hard_ns < 1e6 for method, hard_ns in clocks[1:])


def test_the_table_is_for_people(command_line, tmp_path):
    result = command_line("run", "moe", *SMALL, "-o", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "every result equals the reference, bit by bit" in result.stdout
    assert f"tracekern open {tmp_path}" in result.stdout


def test_suggested_commands_work_for_a_directory_whose_name_looks_like_an_option(tmp_path):
    root, folder = ROOT, Path(sys.executable).parent
    env = {**os.environ, "PYTHONPATH": str(root), "PATH": f"{folder}:{os.environ['PATH']}"}

    def shell(command: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (command, done.stderr)
        return done

    ran = shell(f"python -m tracekern run moe {' '.join(map(str, SMALL))} -o ./-x")
    open_it = re.search(r"show it: (.* open \S+)$", ran.stdout, re.MULTILINE)[1]
    assert " open ./-x" in open_it
    shell(open_it.replace(" open ", " info "))  # `open` itself would wait for a browser
    told = shell(open_it.replace(" open ", " report ")).stderr
    shell(re.search(r"the whole report: (.*)$", told, re.MULTILINE)[1])
    assert (tmp_path / "report.html").is_file()


def test_without_trace_nothing_is_left(command_line, tmp_path):
    result = command_line("run", "moe", *SMALL, "--variant", "all", "--no-trace", "-o", tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    variants = [name for name in VARIANTS if name != "low_latency"]
    assert [run["options"]["variant"] for run in said["runs"]] == variants
    assert [run["trace"] for run in said["runs"]] == [None] * len(variants)
    assert "low_latency is left out: hidden is" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_partitions_of_all_variants_are_for_those_that_have_some():
    given = {"ranks": 4, "experts": 8, "topk": 3, "family_options": {"partitions": 3}, "variant": "all"}
    wanted = {name: {"partitions": 3} if name in ("pipelined", "overlapped") else {} for name in VARIANTS}
    assert {plan.variant: plan.family_options for plan in _plans_of_all(given)} == wanted
    on_gpus = [plan.variant for plan in _plans_of_all({**given, "backend": "cuda"})]
    assert on_gpus == [name for name in VARIANTS if name not in PLAIN_VARIANTS]


def test_a_full_track_is_told_with_the_size_it_needs(command_line, tmp_path):
    small = tmp_path / "small"
    shape = (*SMALL, "--blocks", 1, "--warps", 2)  # few tracks, so that each has much to hold
    result = command_line("run", "moe", *shape, "-o", small, "--records-per-track", 16)
    assert result.returncode == 0, result.stderr
    needed = max(rank["records_needed"] for rank in json.loads(command_line("info", small, "--json").stdout)["ranks"])
    for told in (result.stdout, command_line("info", small).stdout):
        assert f"records_per_track={needed} (--records-per-track {needed}) would have been enough" in told
    refused(
        command_line("merge", small, "-o", tmp_path / "strict.pftrace", "--strict"),
        "record again, or merge without --strict",
    )
    assert not (tmp_path / "strict.pftrace").exists()
    enough = tmp_path / "enough"
    assert command_line("run", "moe", *shape, "-o", enough, "--records-per-track", needed).returncode == 0
    assert {rank["records_lost"] for rank in json.loads(command_line("info", enough, "--json").stdout)["ranks"]} == {0}
    assert command_line("merge", enough, "-o", tmp_path / "strict.pftrace", "--strict").returncode == 0


def test_a_run_that_fails_before_its_first_record_says_only_why(command_line, tmp_path):
    result = command_line("run", "moe", *SMALL, "--backend", "cuda", "-o", tmp_path)
    if result.returncode == 0:
        pytest.skip("there are GPUs here")
    assert "nan" not in result.stdout
    assert "no trace of this run" not in result.stderr
    assert "take the backend cpu" in result.stderr.splitlines()[-1]


def test_a_run_that_fails_early_shows_nothing_of_an_earlier_capture(command_line, finished, tmp_path):
    stale = shutil.copytree(finished[0], tmp_path / "stale")
    result = command_line("run", "moe", *SMALL, "--backend", "cuda", "-o", stale, "--json")
    if result.returncode == 0:
        pytest.skip("there are GPUs here")
    (run,) = json.loads(result.stdout)["runs"]
    assert (run["ok"], run["trace"], run["summary"]) == (False, None, None)
    assert {path.name for path in stale.iterdir()} == {path.name for path in finished[0].iterdir()}


def test_sums_that_nothing_counts_are_left_out(command_line, tmp_path):
    result = command_line("run", "moe", *SMALL, "--variant", "sorted", "-o", tmp_path)
    heads, *rows = [re.split(r"  +", line.strip()) for line in result.stdout.splitlines()[1:6]]
    columns = {head: {row[number] for row in rows} for number, head in enumerate(heads)}
    assert (columns["sent"], columns["received"]) == ({"-"}, {"-"})
    assert all(int(count) for count in columns["spans"])


def test_where_the_trace_cannot_be_written_the_rest_is_said(command_line, tmp_path):
    (tmp_path / "trace.pftrace.gz").mkdir()
    result = command_line("run", "moe", *SMALL, "-o", tmp_path)
    assert result.returncode == 2
    assert "every result equals the reference" in result.stdout
    assert "longest wait" in result.stdout
    assert "cannot write" in result.stderr
    assert result.stderr.endswith(f"; the capture is in {tmp_path}\n")


def begins_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:  # all of it would be gigabytes
        return file.read(len(magic)) == magic


def all_record(launcher: int) -> bool:
    segments = list(Path("/dev/shm").glob(f"tracekern-{launcher}-*-[0-9]"))
    try:
        return len(segments) == 4 and all(begins_with(segment, SEGMENT_MAGIC) for segment in segments)
    except FileNotFoundError:  # the run has ended; the caller sees it
        return False


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")],
    ids=["SIGINT", "SIGTERM"],
)
def test_an_interrupt_ends_all_variants(tmp_path, tmp_path_factory, number, code, said):
    command = [sys.executable, "-m", "tracekern", "run", "moe", *map(str, SMALL), "--variant", "all", "-o", tmp_path]
    command += ["--iterations", "100000"]  # the first variant runs until the signal
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("temporary"))}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        while not all_record(process.pid):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors.splitlines()[-1]) == (code, f"tracekern: {said}")
    assert not any(Path("/dev/shm").glob(f"tracekern-{process.pid}-*"))
    assert not any(Path(environment["TMPDIR"]).iterdir())
    (directory,) = tmp_path.iterdir()
    assert directory.name == "reference"
    later = f"merge {directory} --partial -o {directory}/trace.pftrace.gz"
    if number == signal.SIGTERM:  # soon comes SIGKILL: no time for a trace
        assert later in errors
        assert not (directory / "trace.pftrace.gz").exists()
    else:
        assert later not in errors


def test_a_run_that_does_not_fit_into_memory_is_refused_before_it_starts(tmp_path):
    """The system would kill its ranks one by one, and what else was on the machine."""
    command = [sys.executable, "-m", "tracekern", "run", "moe", *map(str, SMALL), "--no-trace"]

    def said(*more: str, limit_bytes: int = resource.RLIM_INFINITY) -> str:
        done = subprocess.run(
            [*command, *more],
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
        )
        assert done.returncode == 2, done.stderr
        return done.stderr.splitlines()[-1]

    much = said("--tokens", "65536", "--hidden", "65536", "--topk", "8", "--experts", "64")
    assert re.search(r"run moe needs [\d.]+ TiB of (shared )?memory, [\d.]+ .iB are free ", much), much
    limited = said("--tokens", "4096", "--hidden", "7168", limit_bytes=3 << 30)
    assert re.search(r"needs [\d.]+ GiB of address space a rank, [\d.]+ .iB are free by `ulimit -v`", limited), limited
