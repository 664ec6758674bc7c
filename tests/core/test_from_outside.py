"""A library that asks for its launches by tracekern.launch(), traced by whoever runs the program that uses it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import pytest

import tracekern
from tests.kernels import run_kernel
from tests.outside_ranks import LATE_S, LAUNCHES
from tests.sessions import TABLE
from tests.toolchains import ROOT, compile_cached
from tracekern.dump.reader import read_dump
from tracekern.record.session import open_capture
from tracekern.segment.names import remove_segment
from tracekern.segment.salvage import find_leftovers
from tracekern.timeline.load import load

LIBRARY = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import tracekern
from tests.kernels import run_kernel

def step(name="demo"):
    launch = tracekern.launch(name, grid=2, warps=2, events={TABLE!r})
    if launch.traced:
        run_kernel(launch.descriptor, 2, 2, 3)
    return launch.traced

"""


def run(program: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", LIBRARY + program]
    return subprocess.run(words, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=60)


def names_in(directory: Path) -> list[str]:
    return [launch.name for launch in read_dump(directory / "rank_00000.tkdump").launches]


def record(tmp_path: Path, *command: object, **env: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tracekern", "record", "-o", "out", "--", *map(str, command)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | env
    return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)


def test_without_a_capture_a_launch_is_untraced_and_opens_nothing(tmp_path: Path):
    assert tracekern.launch("demo", grid=4, warps=2, stream=3, events=TABLE) == (0, 4, 2, 3)
    with tracekern.capture(tmp_path) as capture:
        launch = tracekern.launch("demo", grid=1, warps=1, events=TABLE, epoch=3)
        run_kernel(launch.descriptor, 1, 1, 2)
        assert open_capture() is capture
    assert not tracekern.launch("demo", grid=4, warps=2, events=TABLE).traced
    (entry,) = load(tmp_path).launches
    assert (entry.name, entry.epoch) == ("demo", 3)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(5)", 5),
        ("1 / 0", 1),
        ("import multiprocessing as m; p = m.get_context('fork').Process(target=step); p.start(); p.join()", 0),
        ("\nif os.fork() == 0:\n    print(step(), file=sys.stderr); sys.exit()\nos.wait()", 0),
    ],
)
def test_the_variable_captures_until_the_end_whatever_it_is(tmp_path: Path, end: str, code: int):
    ended = run(f"print(step(), step())\n{end}", tmp_path, TRACEKERN_CAPTURE="out")
    assert (ended.returncode, ended.stdout) == (code, "True True\n"), ended.stderr
    assert names_in(tmp_path / "out") == ["demo"] * 2
    assert ended.stderr.count("in a fork of its rank") == ("fork" in end)
    assert ("Error" in ended.stderr) == (end == "1 / 0")


def test_only_a_child_process_launches(tmp_path: Path):
    """As under multiprocessing.Process, which ends without what atexit has."""
    program = "import multiprocessing as m; p = m.get_context('fork').Process(target=step); p.start(); p.join()"
    ended = run(program, tmp_path, TRACEKERN_CAPTURE="out")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert names_in(tmp_path / "out") == ["demo"]


def test_the_programs_own_capture_comes_first(tmp_path: Path):
    program = """
with tracekern.capture("first"):
    step("in first")
step("between")
with tracekern.capture("second") as capture:
    step("in second")
print(step("behind"))
"""
    ended = run(program, tmp_path, TRACEKERN_CAPTURE="out")
    assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr
    assert ended.stderr == (f"capture {tmp_path}/out: closed, as the program opens its own into {tmp_path}/second\n")
    found = {name: names_in(tmp_path / name) for name in ("first", "out", "second")}
    assert found == {"first": ["in first"], "out": ["between"], "second": ["in second"]}


def test_a_fork_may_open_a_capture_of_its_own(tmp_path: Path):
    """As it may without the variable."""
    program = """
step("of the rank")
if os.fork() == 0:
    with tracekern.capture("own"):
        sys.exit(not step("of the fork"))
print(os.wait()[1], step("of the rank"))
"""
    ended = run(program, tmp_path, TRACEKERN_CAPTURE="out")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0 True\n", "")
    assert {name: names_in(tmp_path / name) for name in ("own", "out")} == {
        "own": ["of the fork"],
        "out": ["of the rank"] * 2,
    }


def test_a_kernel_may_start_when_its_capture_has_closed(tmp_path: Path):
    """As where stop() is called between tracekern.launch() and the kernel. It crashed in unmapped memory."""
    program = f"""
import gc, threading
tracekern.start("out")
launches = []
ask = lambda: launches.append(tracekern.launch("demo", grid=2, warps=2, events={TABLE!r}))
thread = threading.Thread(target=ask)
thread.start()
thread.join()
tracekern.stop()
gc.collect()
run_kernel(launches[0].descriptor, 2, 2, 3)
sys.exit(5)
"""
    ended = run(program, tmp_path)
    assert (ended.returncode, ended.stderr) == (5, "")


def test_options_come_as_json(tmp_path: Path):
    program = "print(*(step() for _ in range(4)))"
    ended = run(program, tmp_path, TRACEKERN_CAPTURE="out", TRACEKERN_CAPTURE_OPTIONS='{"every": 2}')
    assert (ended.stdout, ended.stderr) == ("True False True False\n", "")
    for text, why in {
        "every=2": "wanted arguments of tracekern.capture() as JSON",
        "[1]": "wanted arguments of tracekern.capture() as JSON",
        '{"evry": 2}': "unexpected keyword argument 'evry'",
        '{"every": 0}': "every=0: wanted 1 or more",
    }.items():
        ended = run(program, tmp_path, TRACEKERN_CAPTURE="none", TRACEKERN_CAPTURE_OPTIONS=text)
        assert (ended.returncode, ended.stdout) == (0, "False False False False\n")
        (line,) = ended.stderr.splitlines()
        assert line.startswith(f"capture {tmp_path}/none: ")
        assert why in line
    assert not (tmp_path / "none").exists()


def test_a_working_directory_that_is_gone_is_a_line(tmp_path: Path):
    (tmp_path / "gone").mkdir()
    program = "os.chdir('gone'); os.rmdir('../gone'); print(step(), step())"
    ended = run(program, tmp_path, TRACEKERN_CAPTURE="out")
    assert (ended.returncode, ended.stdout) == (0, "False False\n")
    assert ended.stderr == (
        "capture out: out: the working directory is gone; give an absolute path; "
        "nothing more is recorded, the run goes on\n"
    )


def test_a_rank_that_never_joins_the_others_says_so_at_its_end(tmp_path: Path):
    ended = run("print(step())", tmp_path, TRACEKERN_CAPTURE="out", RANK="1", WORLD_SIZE="2")
    assert (ended.returncode, ended.stdout) == (0, "False\n")
    why = "nothing was recorded: rank 1 of 2 had not initialised torch.distributed at its last launch"
    assert ended.stderr == f"capture {tmp_path}/out: {why}\n"


@pytest.mark.parametrize(
    ("end", "code", "killed_by"),
    [("os.kill(os.getpid(), signal.SIGTERM)", 143, "SIGTERM"), ("os._exit(4)", 4, "")],
)
def test_record_saves_what_a_killed_process_left(tmp_path: Path, end: str, code: int, killed_by: str):
    ended = record(tmp_path, sys.executable, "-c", f"{LIBRARY}step()\n{end}")
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.splitlines()[:2] == [
        "rank 0 ended without closing the capture: saved from shared memory",
        "1 launch of rank 0 -> out",
    ]
    (rank,) = load(tmp_path / "out").ranks
    assert (rank.state, rank.metadata["killed_by"]) == ("salvaged", killed_by)
    assert not [leftover for leftover in find_leftovers() if leftover.directory == tmp_path / "out"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_programs_of_one_record_capture_side_by_side(tmp_path: Path):
    (tmp_path / "library.py").write_text(LIBRARY)
    program = " && ".join(f"{sys.executable} -c 'import library; library.step(\"{name}\")'" for name in "abc")
    for _ in range(2):
        ended = record(tmp_path, "sh", "-c", program, PYTHONPATH=os.pathsep.join(map(str, (tmp_path, ROOT))))
        assert ended.returncode == 0, ended.stderr
        places = [tmp_path / "out", tmp_path / "out" / "attempt-1", tmp_path / "out" / "attempt-2"]
        assert [names_in(place) for place in places] == [["a"], ["b"], ["c"]]
        assert all(f"1 launch of rank 0 -> {place.relative_to(tmp_path)}\n" in ended.stderr for place in places)
        assert ended.stderr.count("captured, under the same `tracekern record`: this capture goes to ") == 2


def test_record_says_what_is_left_where_the_disk_is_full(tmp_path: Path):
    (tmp_path / "full").mkdir()
    program = LIBRARY + "for _ in range(50):\n    step()"
    command = [sys.executable, "-m", "tracekern", "record", "-o", "full/out", sys.executable, "-c", program]
    mounted = f'mount -t tmpfs -o size=12k tmpfs {tmp_path}/full && exec "$@"'
    words = ["unshare", "-m", "sh", "-c", mounted, "-", *command]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    (left,) = (leftover for leftover in find_leftovers() if leftover.directory == tmp_path / "full" / "out")
    remove_segment(f"tracekern-{left.run_id}-0")
    assert ended.returncode == 1, ended.stderr
    told = ended.stderr.splitlines()[-1]
    assert told.startswith("rank 0: not saved, and still in shared memory: ")
    assert told.endswith(f"salvage {left.run_id} -o DIR")
    assert "nothing was recorded" not in ended.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system that is read-only")
def test_record_says_why_a_directory_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    record = [sys.executable, "-m", "tracekern", "record", "-o"]
    mounted = f'mount -t tmpfs -o ro tmpfs {tmp_path} && exec "$@"'
    fixed = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted, "-", *record, tmp_path / "out", "true"], capture_output=True, text=True
    )
    assert (fixed.returncode, f"{tmp_path} lies on a read-only file system; choose" in fixed.stderr) == (2, True)
    file = subprocess.run([*record, tmp_path / "file", "true"], capture_output=True, text=True)
    assert (file.returncode, f"{tmp_path}/file is a file; choose" in file.stderr) == (2, True)


def test_record_says_that_nothing_was_recorded(tmp_path: Path, command_line):
    nothing = command_line("record", "-o", tmp_path / "out", sys.executable, "-c", "print('its own line'); exit(9)")
    assert (nothing.returncode, nothing.stdout) == (9, "its own line\n")
    assert nothing.stderr.startswith(f"{tmp_path}/out: nothing was recorded: ")


@pytest.fixture(scope="module")
def my_kernel() -> Path:
    """The compiled examples/my_kernel, as its trace_it.py has it compiled in tests."""
    includes = [f"-I{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
    flags = ("-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", *includes)
    return compile_cached(("g++", *flags), ROOT / "examples" / "my_kernel" / "my_kernel.cpp", ".so")


@pytest.mark.parametrize(
    ("options", "why", "num_loaded"),
    [
        (
            {"keep": "last"},
            "3 launches of copy ran untraced: the list of its with_recorder<...>() lacks Recorder<true, "
            'tracekern::RecordFormat::ring>; add it, or capture without keep="last"',
            0,
        ),
        (
            {"events": ["copy_row", "load_word"]},
            "3 launches of copy recorded nothing of load_word: no body in the list of its with_recorder<...>() has "
            "their level; add Recorder<true, tracekern::RecordFormat::span>",
            3,
        ),
        ({}, "", 3),
    ],
)
def test_a_body_that_a_library_lacks_is_a_line(tmp_path: Path, options: dict, why: str, num_loaded: int):
    """It aborted the program by an exception of C++; a level was left out in silence."""
    flags = ("-std=c++20", "-O1", "-shared", "-fPIC", "-pthread")
    library = compile_cached(("g++", *flags), ROOT / "tests" / "cpp" / "one_body.cpp", ".so")
    program = f"""
import ctypes
library = ctypes.CDLL({str(library)!r})
library.events.restype, library.launch.restype = ctypes.c_char_p, ctypes.c_bool
for _ in range(3):
    launch = tracekern.launch("copy", grid=1, warps=1, events=library.events().decode())
    print(library.launch(ctypes.c_uint64(launch.descriptor)))
sys.exit(5)
"""
    ended = run(program, tmp_path, TRACEKERN_CAPTURE="out", TRACEKERN_CAPTURE_OPTIONS=json.dumps(options))
    assert (ended.returncode, ended.stdout) == (5, "True\n" * 3), ended.stderr
    assert ended.stderr == (f"capture {tmp_path}/out: {why}\n" if why else "")
    timeline = load(tmp_path / "out")
    assert len(timeline.marks) == num_loaded
    told = [("lacking_body", 3, f"rank 0: {why}")] if why else []
    assert [(problem.kind, problem.count, problem.text) for problem in timeline.problems] == told


def record_ranks(tmp_path: Path, case: str, kernel: Path, **env: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return record(tmp_path, *torchrun, ROOT / "tests" / "outside_ranks.py", case, kernel, **env)


@pytest.mark.parametrize("case", ["in order", pytest.param("with its group", marks=pytest.mark.rotates)])
def test_record_captures_all_ranks_of_torchrun(tmp_path: Path, my_kernel: Path, case: str):
    ended = record_ranks(tmp_path, case, my_kernel)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if " -> " in line]
    assert lines == [f"{2 * LAUNCHES} launches of ranks 0 and 1 -> out"]
    assert "verdict  No cause is named: " in ended.stderr
    assert re.search("more of it: .*tracekern report out   show it: .*tracekern open out", ended.stderr)
    timeline = load(tmp_path / "out", strict=True)
    assert [(launch.rank, launch.sequence) for launch in timeline.launches] == [
        (rank, number) for rank in range(2) for number in range(LAUNCHES)
    ]
    assert {rank.state for rank in timeline.ranks} == {"closed"}


@pytest.mark.rotates
def test_ranks_that_launch_do_not_wait_long_for_one_that_does_not(tmp_path: Path, my_kernel: Path):
    ended = record_ranks(tmp_path, "never launches", my_kernel, TRACEKERN_GROUP_TIMEOUT_S="2")
    assert ended.returncode == 0, ended.stderr
    told = [line for line in ended.stderr.splitlines() if line.startswith("capture ")]
    assert told == [
        f"capture {tmp_path}/out: rank 0: not all ranks open what this one opens: rank 1 did not come within 2 s; "
        "nothing more is recorded, the run goes on"
    ]
    assert (tmp_path / "traced-0").read_text() == "0"
    assert LATE_S > 2


def test_a_rank_that_ends_early_is_recorded_too_and_holds_up_nobody(tmp_path: Path, my_kernel: Path):
    """torchrun ends the other rank by SIGTERM, when it sees the end of the first. This one waited a minute for it."""
    ended = record_ranks(tmp_path, "fails", my_kernel)
    assert ended.returncode == 1, ended.stderr
    assert not (tmp_path / "slept-0").exists()
    timeline = load(tmp_path / "out")
    assert [len([launch for launch in timeline.launches if launch.rank == rank]) for rank in range(2)] == [LAUNCHES] * 2
