"""Reports in windows say what they say in memory, whichever process is killed and whatever is damaged."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from captures import CaptureSpec, write_capture
from windowed_report import AS_IF, BYTES_A_SPAN

from tests.damaged_cases import damage_capture, make_bases
from tests.kernels import run_kernel
from tests.paths import ROOT, TESTS, TRACES
from tests.sessions import TABLE
from tracekern.analysis import in_windows
from tracekern.analysis.scratch_folder import folder_of
from tracekern.cli.main import main
from tracekern.errors import BadInput
from tracekern.record import session as sessions
from tracekern.timeline.load import load

HAVE_ENGINES = ("fabric_late_rank", "kv_cache", "two_hosts", "weights", "weights_broadcast")
CAPTURES = sorted(path.parent.name for path in TRACES.glob("*/capture.json"))
LATE = "h200x4_late_host"
"""It has windows of the same length, so that two may be in memory."""
FEW = ("h200x4", "h100x2_pipelined")
OTHERS = [pytest.param(name, marks=pytest.mark.soak) for name in CAPTURES if name not in FEW]


@dataclass
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, of processes that tests start, too."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def report(scratch, monkeypatch, capsys) -> Callable[..., Ended]:
    """Runs the command in this process, as if a span took much memory. Its folder is empty afterwards."""
    for name, value in AS_IF.items():
        monkeypatch.setattr(in_windows, name, value)

    def run(*arguments: object, processes: int = 1) -> Ended:
        monkeypatch.setattr(in_windows, "usable_cores", lambda: processes)
        monkeypatch.setattr(sys, "argv", ["tracekern", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert list(scratch.iterdir()) == []
        return Ended(ended.value.code or 0, out, err)

    return run


def memory_for(capture: Path, windows: float, processes: int = 1) -> str:
    """Returns what makes so many windows of a capture, if cuts are where they are needed."""
    num_spans = in_windows.Cost.of([capture], 1 << 60).num_spans
    return f"{num_spans * BYTES_A_SPAN * processes / windows / 1e6:f}MB"


def start(
    capture: Path, windows: float, *, processes: int = 1, stderr: int = subprocess.PIPE, **about: int
) -> subprocess.Popen[str]:
    """The command with --json in a process, and a group of processes, of its own; about: see windowed_report.py."""
    words = [str(TESTS / "windowed_report.py"), json.dumps({"processes": processes, **about})]
    words += ["report", str(capture), "--json", "--memory", memory_for(capture, windows, processes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, start_new_session=True, **pipes)


def end(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate(timeout=300)
    return Ended(process.returncode, out, err)


def files_made(ended: Ended) -> int:
    return int(ended.err.rsplit("files made: ", 1)[1])


def last_line(ended: Ended) -> str:
    return [line for line in ended.err.splitlines() if not line.startswith("files made")][-1]


def wait_until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.002)


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that it gives tasks."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def files_in(scratch: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(scratch))


@pytest.fixture(scope="module")
def told() -> Iterator[Callable[[str], str]]:
    """Name of a kept capture -> what `report --json` says of it in memory."""
    known: dict[str, str] = {}

    def tell(name: str) -> str:
        if name not in known:
            words = [sys.executable, "-m", "tracekern", "report", str(TRACES / name), "--json"]
            known[name] = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return known[name]

    return tell


@pytest.mark.parametrize("name", [*FEW, *OTHERS])
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("windows", [2, pytest.param(5, marks=pytest.mark.soak), 12])
def test_a_kept_capture_is_told_alike(report, name: str, windows: int, processes: int, told):
    capture = TRACES / name
    memory = memory_for(capture, windows, processes)
    found = report(capture, "--json", "--memory", memory, processes=processes)
    assert (found.code, found.out) == (0, told(name))
    if name in HAVE_ENGINES:
        assert found.err.startswith("in memory: what transfer engines did goes over all of the run: ")
        assert " of memory, not " in found.err
    else:
        assert found.err.startswith("in windows: ")
        assert f"{processes} at a time, take about " in found.err


def test_two_processes_tell_the_same(report, told):
    found = report(TRACES / LATE, "--json", "--memory", memory_for(TRACES / LATE, 4, 2), processes=2)
    assert found.out == told(LATE)


def test_the_line_before_the_work_says_what_it_takes(report):
    capture = TRACES / "h200x4"
    assert "memory" not in report(capture, "--json").err
    found = report(capture, "--json", "--memory", memory_for(capture, 0.5))
    assert found.err == "in memory: 10,308 spans take about 104MB and 82.5 ms of CPU time\n"
    found = report(capture, "--json", "--memory", memory_for(capture, 4))
    first, second = found.err.splitlines()
    assert first.startswith(
        "in windows: 10,308 spans do not fit into 26MB; 5 windows or more, 1 at a time, take about "
    )
    assert "82.5 ms of CPU time and 2.9 MiB of /" in first
    assert second == "a window without a cut: 3,976 spans take about 40MB of memory, not 26MB"


@pytest.mark.parametrize("name", ["h200x4", *OTHERS])
def test_options_and_pages_are_alike(report, tmp_path: Path, name: str):
    capture, times = TRACES / name, load(TRACES / name).spans
    first, last = int(times.start.min()), int(times.end.max())
    in_memory = ("--memory", "9TB")
    for options in (
        ("--window", f"{(3 * first + last) // 4}:{(first + last) // 2}", "--json"),
        ("--window", f"{(first + last) // 2}:{last}", "--json"),
        ("--window", f"{last + 1000}:{last + 2000}", "--json"),
        ("--unaligned", "--json"),
        ("--every", "2", "--json"),
        (),
    ):
        whole = report(capture, *options, *in_memory)
        found = report(capture, *options, "--memory", memory_for(capture, 6))
        assert (found.code, found.out) == (whole.code, whole.out), options
        assert whole.code == 0 or last_line(found) == last_line(whole)
    pages = [tmp_path / "memory" / "report.html", tmp_path / "windows" / "report.html"]
    for page, memory in zip(pages, ["9TB", memory_for(capture, 6)], strict=True):
        page.parent.mkdir()
        assert report(capture, "-o", page, "--memory", memory).code == 0
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_a_key_chooses_the_same_time(report, tmp_path: Path):
    with sessions.capture(tmp_path / "keyed") as session:
        for key in ("warm-up", *("layer 1", "layer 2") * 20):
            launched = session.launch("demo", grid=1, warps=1, events=TABLE, key=key)
            run_kernel(launched.descriptor, 1, 1, 2)
    memory = memory_for(tmp_path / "keyed", 3)
    for key in ("layer 1", "layer 2", "layer 3"):
        words = (tmp_path / "keyed", "--json", "--key", key)
        whole, found = (report(*words, "--memory", each) for each in ("9TB", memory))
        assert (found.code, found.out) == (whole.code, whole.out)
        assert found.err.startswith("in windows: ")
        assert whole.code == 0 or last_line(found) == last_line(whole)


def test_some_ranks_with_partial_are_alike(report):
    dumps = sorted((TRACES / "h200x4").glob("*.tkdump"))[1:3]
    memory = memory_for(TRACES / "h200x4", 12)
    whole, found = (report(*dumps, "--partial", "--json", "--memory", each) for each in ("9TB", memory))
    assert (found.code, found.out) == (0, whole.out)
    assert found.err.startswith("in windows")
    refused = report(TRACES / "h200x4", "--ranks", "0", "--memory", memory)
    assert refused.code == 2
    assert last_line(refused).startswith("tracekern: --ranks: 10,308 spans do not fit into ")


@pytest.mark.parametrize("name", ["h100_int4_direct", "killed"])
def test_what_cannot_be_cut_is_whole_and_says_why(report, tmp_path: Path, name: str):
    """A run that did not end, too: what each rank did last is looked for in all of it."""
    why = "at no time between iterations have all launches ahead ended on every rank"
    capture = TRACES / name
    if name == "killed":
        spec = CaptureSpec(num_ranks=2, groups=20, launches=3, killed_rank=1)
        capture, why = write_capture(tmp_path / name, spec), "rank 1 did not end, and the last that each did is looked"
    whole = report(capture, "--json", "--memory", "9TB")
    found = report(capture, "--json", "--memory", memory_for(capture, 5))
    assert (found.code, found.out) == (0, whole.out)
    *_, line = found.err.splitlines()
    assert line.startswith(f"in memory: {why}")
    assert line.endswith(f" of memory, not {in_windows._said(round(float(memory_for(capture, 5)[:-2]) * 1e6))}")


def test_what_takes_more_than_is_free_is_refused(report, monkeypatch):
    monkeypatch.setattr(in_windows, "free_memory", lambda: (40_000_000, "on this machine"))
    cut = TRACES / "h200x4"
    assert report(cut, "--memory", memory_for(cut, 4)).code == 0
    monkeypatch.setattr(in_windows, "free_memory", lambda: (30_000_000, "on this machine"))
    for capture, wanted in (
        (cut, "a window without a cut: 3,976 spans take about 40MB of memory, and 30MB are free on this machine"),
        (TRACES / "h100_int4_direct", "epoch goes on: 21,648 spans take about 217MB of memory, and 30MB are free on"),
        (TRACES / "two_hosts", "goes over all of the run: 210,864 spans take about 2109MB of memory, and 30MB are"),
    ):
        refused = report(capture, "--memory", "20MB")
        assert (refused.code, refused.out) == (2, "")
        assert wanted in last_line(refused)
        assert last_line(refused).startswith("tracekern: ")


def test_memory_that_is_no_size_or_too_little_is_refused(command_line):
    for given, wanted in (
        ("3", "--memory: got '3', wanted a number and MB, GB or TB, as in 4GB"),
        ("-1GB", "--memory: got '-1GB', wanted a number and MB, GB or TB, as in 4GB"),
        ("0GB", "0MB of memory are too little for any window; wanted 253MB or more"),
        ("252MB", "252MB of memory are too little for any window; wanted 253MB or more"),
    ):
        refused = command_line("report", TRACES / "h200x4", "--memory", given)
        assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", f"tracekern: {wanted}\n")


KILLED_AT = [1, 3, 40, 125]
IN_TURN = 13
"""So many files at most, one a window, are made again."""


@pytest.mark.parametrize("kill_at", [*KILLED_AT, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 150, 6))])
def test_a_report_that_was_killed_goes_on(scratch, told, kill_at: int):
    capture = TRACES / "h200x4"
    assert end(start(capture, 8, kill_at=kill_at)).code == -signal.SIGKILL
    assert files_in(scratch) >= kill_at
    found = end(start(capture, 8))
    assert (found.code, found.out) == (0, told("h200x4"))
    assert list(scratch.iterdir()) == []
    has_run = kill_at >= 20
    assert ("going on with what the same report left when it was stopped" in found.err) is has_run
    if has_run:
        made = files_made(end(start(capture, 8)))
        assert made - kill_at <= files_made(found) <= made - kill_at + IN_TURN


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in CAPTURES if name not in HAVE_ENGINES])
def test_any_report_that_was_killed_goes_on(scratch, told, name: str):
    made = files_made(end(start(TRACES / name, 4)))
    for kill_at in np.linspace(1, made - 1, 7).astype(int).tolist():
        assert end(start(TRACES / name, 4, kill_at=kill_at)).code == -signal.SIGKILL
        found = end(start(TRACES / name, 4))
        assert found.out == told(name)
        assert "going on" not in found.err or made - kill_at <= files_made(found) <= made - kill_at + IN_TURN
        assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("num_files", [20, pytest.param(70, marks=pytest.mark.soak)])
def test_processes_end_with_the_one_that_was_killed(scratch, told, num_files: int):
    process = start(TRACES / LATE, 4, processes=2)
    wait_until(lambda: files_in(scratch) >= num_files and bool(children_of(process)))
    workers = children_of(process)
    process.kill()
    end(process)
    wait_until(lambda: not any(map(is_alive, workers)))
    found = end(start(TRACES / LATE, 4, processes=2))
    assert (found.code, found.out) == (0, told(LATE))
    assert "going on" in found.err
    assert list(scratch.iterdir()) == []


def test_another_process_does_the_tasks_of_one_that_was_killed(scratch, told):
    process = start(TRACES / LATE, 4, processes=2)
    wait_until(lambda: len(children_of(process)) == 2 and files_in(scratch) >= 30)
    os.kill(children_of(process)[0], signal.SIGKILL)
    found = end(process)
    assert (found.code, found.out) == (0, told(LATE))
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("to_all", [True, False])
def test_an_interrupted_report_leaves_nothing(scratch, processes: int, to_all: bool):
    """Ctrl-C goes to all processes of a terminal, `kill -INT` to one."""
    process = start(TRACES / LATE, 4, processes=processes)
    wait_until(lambda: files_in(scratch) >= 25)
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    found = end(process)
    assert (found.code, last_line(found)) == (130, "tracekern: interrupted")
    assert "Traceback" not in found.err
    assert list(scratch.iterdir()) == []


def test_the_same_report_twice_at_once(scratch, told):
    first = start(TRACES / "h200x4", 8)
    wait_until(lambda: files_in(scratch) >= 2)
    for found in (end(start(TRACES / "h200x4", 8)), end(first)):
        assert (found.code, found.out) == (0, told("h200x4"))
    assert list(scratch.iterdir()) == []


def test_a_second_one_has_a_folder_of_its_own(scratch):
    with folder_of("the same") as first, folder_of("the same") as second, folder_of("another") as third:
        assert len({first, second, third}) == 3
        (first / "file").touch()
    assert list(scratch.iterdir()) == []
    with folder_of("the same") as again:
        assert again == first
        assert not (again / "file").exists()


def test_a_folder_is_removed_a_day_after_its_process_died(scratch):
    def make(name: str, hours: float) -> Path:
        folder = scratch / name
        folder.mkdir()
        (folder / "lock").touch()
        then = time.time() - hours * 3600
        os.utime(folder, (then, then))
        return folder

    own = f"tracekern-windows-{os.geteuid()}-"
    old, left = make(f"{own}0123-0", 25), make(f"{own}0123-0.77", 25)
    young, others, unknown = make(f"{own}4567-0", 23), make("tracekern-windows-99999-89ab-0", 25), make("work", 25)
    link = scratch / f"{own}cdef-0"
    link.symlink_to(unknown)
    os.utime(link, (0, 0), follow_symlinks=False)
    with folder_of("busy") as busy:
        os.utime(busy, (0, 0))
        with folder_of("something"):
            kept = set(scratch.iterdir())
            assert {young, others, unknown, link, busy} <= kept
            assert not {old, left} & kept
            assert unknown.is_dir()


def test_a_folder_that_is_not_ours_is_refused(report, scratch):
    with folder_of("this") as folder:
        pass
    aim = scratch.parent / "aim"
    aim.mkdir()
    folder.symlink_to(aim)
    with pytest.raises(BadInput, match="cannot be used .it is not ours.; set TMPDIR"), folder_of("this"):
        pass
    folder.unlink()
    folder.touch()
    with pytest.raises(BadInput, match="cannot be used .*; set TMPDIR to a folder with room"), folder_of("this"):
        pass
    assert list(aim.iterdir()) == []


def cut_short(data: bytearray) -> bytearray:
    return data[: len(data) // 2]


def flip(place: float) -> Callable[[bytearray], bytearray]:
    def damage(data: bytearray) -> bytearray:
        data[int(place * (len(data) - 1))] ^= 0x10
        return data

    return damage


@pytest.mark.parametrize("damage", [cut_short, flip(0), flip(0.0002), flip(0.5), flip(1)])
def test_a_damaged_dump_is_refused_as_in_memory(report, tmp_path: Path, damage):
    capture = shutil.copytree(TRACES / "h200x4", tmp_path / "capture")
    memory = memory_for(capture, 8)
    path = sorted(capture.glob("*.tkdump"))[2]
    path.write_bytes(damage(bytearray(path.read_bytes())))
    whole, found = (report(capture, "--json", "--memory", each) for each in ("9TB", memory))
    assert (found.code, found.out) == (2, "")
    assert last_line(found) == last_line(whole)
    assert last_line(found).startswith(f"tracekern: {path}")


@pytest.mark.parametrize(("full_at", "processes"), [(1, 1), (9, 1), (15, 1), (80, 1), (11, 2)])
def test_a_full_disk_is_one_line(scratch, full_at: int, processes: int):
    found = end(start(TRACES / LATE, 4, processes=processes, full_at=full_at))
    assert (found.code, found.out) == (2, "")
    assert last_line(found).startswith("tracekern: ")
    assert "TMPDIR" in last_line(found)
    assert str(scratch) in last_line(found)
    assert "Traceback" not in found.err
    assert list(scratch.iterdir()) == []


def test_no_folder_for_files_is_one_line(scratch, monkeypatch, report):
    monkeypatch.setattr("tempfile.tempdir", str(scratch / "missing"))
    refused = report(TRACES / "h200x4", "--memory", memory_for(TRACES / "h200x4", 8))
    assert (refused.code, refused.out) == (2, "")
    assert "cannot be used (No such file or directory); set TMPDIR to a folder with room" in last_line(refused)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(scratch / "missing")])
    refused = report(TRACES / "h200x4", "--memory", memory_for(TRACES / "h200x4", 8))
    assert last_line(refused).startswith("tracekern: windows need a folder for files: No usable temporary directory")


def test_a_terminal_shows_how_far_it_is(scratch):
    terminal, inside = pty.openpty()
    process = start(TRACES / "h200x4", 8, stderr=inside)
    os.close(inside)
    shown = b""
    with contextlib.suppress(OSError):  # it has ended
        while read := os.read(terminal, 1 << 16):
            shown += read
    os.close(terminal)
    assert end(process).code == 0
    assert b"reading ranks" in shown
    assert b"windows in round " in shown
    assert b"\r\x1b[2Ka window without a cut: 3,976 spans" in shown, "where the bar was"


def test_a_process_may_make_the_same_report_again(report, told):
    capture = TRACES / "h100x2_pipelined"
    for _ in range(3):
        found = report(capture, "--json", "--memory", memory_for(capture, 6, 2), processes=2)
        assert found.out == told(capture.name)


@pytest.mark.parametrize("cases", [range(8), pytest.param(range(8, 150), marks=pytest.mark.soak)])
@pytest.mark.filterwarnings("ignore")  # numbers that are damaged run over
def test_damaged_captures_are_told_alike(report, tmp_path: Path, cases: range):
    bases, in_windows_to_the_end = make_bases(tmp_path), 0
    for case in cases:
        draw, capture = random.Random(case), tmp_path / f"case_{case}"
        damage_capture(draw, draw.choice(bases), capture)
        options = [*(["--unaligned"] if draw.random() < 0.2 else []), *(["--partial"] if draw.random() < 0.3 else [])]
        whole = report(capture, "--json", *options, "--memory", "9TB")
        found = report(capture, "--json", *options, "--memory", "2MB")
        assert (found.code, found.out) == (whole.code, whole.out), case
        assert whole.code == 0 or last_line(found) == last_line(whole)
        in_windows_to_the_end += found.code == 0 and "in memory" not in found.err
    assert in_windows_to_the_end >= len(cases) // 20
