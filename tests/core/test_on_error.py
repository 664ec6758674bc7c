"""A capture that fails does not end the program that it records: on_error="warn", and what holds without it, too."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_resident import on_ranks

from tests.kernels import TrackWriter
from tests.on_error_ranks import IN_VAIN, LIMIT_S, OWN_EXIT
from tests.paths import ROOT
from tests.sessions import TABLE, launch
from tracekern.comm.devices.this_thread import rank_of_thread
from tracekern.comm.ranks.group import losing_peers
from tracekern.errors import BadInput, PeerLost
from tracekern.launcher.launch import launch_ranks
from tracekern.launcher.spawner import Spawner
from tracekern.record.session import Capture, capture, open_capture
from tracekern.segment.directory_lock import locked
from tracekern.segment.names import SHM_DIR, list_segments, remove_segment
from tracekern.segment.salvage import salvage_run
from tracekern.timeline.load import load

OF_TORCH = re.compile(r"\[rank\d\]:\[|\[/\S*/gloo/")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")


@pytest.fixture
def run_id(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the runs that a test starts."""
    name = f"on-error-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("TRACEKERN_RUN_ID", name)
    yield name
    for segment in list_segments(name):
        remove_segment(segment)


PROGRAM = f"""
import sys
import tracekern
for arguments in [{{}}]:
    with tracekern.capture(sys.argv[1], on_error="warn", **arguments) as capture:
        with capture.counting(), capture.range("step"), tracekern.range("step"):
            launched = capture.launch("demo", grid=2, warps=3, stream=4, events={TABLE!r})
        print(*launched, launched.traced, capture.footprint_bytes)
        capture.sample_clocks()
        capture.add_torch_profile("there is none")
sys.exit({OWN_EXIT})
"""


def run(program: str, *arguments: object, cwd: Path = ROOT, mount: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a program of Python. mount: a place, and how many bytes it has."""
    words = [sys.executable, "-c", program, *map(str, arguments)]
    if mount:
        place, size = mount.split()
        mounts = f'mount -t tmpfs -o size={size} none {place} && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", mounts, "sh", *words]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=cwd)


def check_untraced(ended: subprocess.CompletedProcess[str], directory: Path, *reasons: str) -> None:
    """Checks that the program ran to its own end, and that a line says why there is no capture; one a capture."""
    assert (ended.returncode, ended.stdout) == (OWN_EXIT, "0 2 3 4 False 0\n" * len(reasons)), ended.stderr
    lines = ended.stderr.splitlines()
    assert len(lines) == len(reasons), lines
    where = f"capture {re.escape(str(directory))}: "
    for line, why in zip(lines, reasons, strict=True):
        assert re.fullmatch(f"{where}.*{why}.*; nothing more is recorded, the run goes on", line)


def test_a_capture_that_cannot_open_leaves_the_program_alone(tmp_path: Path):
    reasons = {
        "settings={'x': {1}}": "set is not JSON serializable",
        "every=0": "every=0",
        "device='tpu'": "device='tpu'",
        "sink='device'": "sink='device'",
        "preload=[lambda: 1 // 0]": "ZeroDivisionError: ",
        "max_bytes=1 << 47": f"no room in {SHM_DIR}",
    }
    arguments = ", ".join(f"dict({case})" for case in reasons)
    ended = run(PROGRAM.replace("in [{}]", f"in [{arguments}]"), tmp_path / "new")
    check_untraced(ended, tmp_path / "new", *reasons.values())
    assert not (tmp_path / "new").exists()


def test_so_does_one_without_a_directory(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", Path("/proc/capture")):
        check_untraced(run(PROGRAM, path), path, "cannot be written")
    with locked(tmp_path, "another"):
        check_untraced(run(PROGRAM, tmp_path), tmp_path, "run another .* is writing its capture there")


def test_so_does_one_whose_segment_is_taken(tmp_path: Path, run_id: str):
    taken = SHM_DIR / f"tracekern-{run_id}-0"
    taken.touch(0o600)
    try:
        check_untraced(run(PROGRAM, tmp_path), tmp_path, "already there from another run")
    finally:
        taken.unlink()


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "found out"])
def test_with_too_few_files_a_capture_leaves_no_segment(tmp_path: Path, run_id: str, monkeypatch, is_told: bool):
    monkeypatch.setenv("TRACEKERN_RUN_ID", run_id)
    if not is_told:
        monkeypatch.setattr("tracekern.comm.ranks.group.lacking_files", lambda num_ranks: "")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used, said = len(os.listdir("/proc/self/fd")) - 1, []
    for room in range(20):
        session = capture(tmp_path, max_bytes=1 << 16)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, before[1]))
        try:
            session.__enter__()
        except (BadInput, OSError) as error:
            said.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        if len(said) <= room:
            session.__exit__(None, None, None)
        assert not list_segments(run_id), room
    if is_told:
        wanted = r"rank 0 needs 17 more open files and may open \d+; raise the limit \(`ulimit -n`, now \d+\)"
        assert len(said) in (17, 18)
        assert all(re.fullmatch(wanted, text) for text in said)


def test_so_does_one_of_a_rank_that_nobody_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    check_untraced(run(PROGRAM, tmp_path), tmp_path, "initialise torch.distributed")
    monkeypatch.setenv("RANK", "2")
    check_untraced(run(PROGRAM, tmp_path), tmp_path, "RANK=2 WORLD_SIZE=2")


def test_so_does_one_without_the_compiled_part(tmp_path: Path):
    left_out = shutil.ignore_patterns("*.so", "__pycache__", "include")
    shutil.copytree(ROOT / "tracekern", tmp_path / "tracekern", ignore=left_out)
    ended = run(PROGRAM, tmp_path / "capture", cwd=tmp_path)
    check_untraced(ended, tmp_path / "capture", "tracekern was installed without its compiled extension, .*")


@as_root
def test_so_does_one_without_room_for_its_segment(tmp_path: Path):
    check_untraced(run(PROGRAM, tmp_path, mount=f"{SHM_DIR} 4k"), tmp_path, f"no room in {SHM_DIR}")


FILLS_THE_DISK = f"""
import contextlib, sys, tracekern
with tracekern.capture(sys.argv[1], on_error=sys.argv[2]) as capture:
    capture.launch("demo", grid=1, warps=1, events={TABLE!r})
    with contextlib.suppress(OSError), open(sys.argv[1] + "/filler", "wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    if sys.argv[3] == "error":
        raise RuntimeError("of the user")
sys.exit({OWN_EXIT})
"""


@as_root
@pytest.mark.parametrize("case", ["warn done", "warn error", "raise error"])
def test_a_full_disk_at_the_end_is_one_line_that_says_how_to_save(tmp_path: Path, run_id: str, case: str):
    (tmp_path / "small").mkdir()
    ended = run(FILLS_THE_DISK, tmp_path / "small", *case.split(), mount=f"{tmp_path / 'small'} 16k")
    first, *rest = ended.stderr.splitlines()
    how = f"`tracekern salvage {run_id} -o DIR` saves it"
    assert re.fullmatch(f"capture .*/small: cannot write .*: No space left on device; .*{how}", first)
    if case == "warn done":
        assert (ended.returncode, rest) == (OWN_EXIT, [])
    else:
        assert (ended.returncode, rest[0]) == (1, "Traceback (most recent call last):")
        assert rest[-1] == "RuntimeError: of the user"
        assert "During handling" not in ended.stderr
    salvage_run(run_id, tmp_path / "saved")
    assert len(load(tmp_path / "saved").launches) == 1


def fail_to_launch(session: Capture) -> None:
    assert session.launch("demo", grid=0, warps=2, stream=5, events=TABLE) == (0, 0, 2, 5)


def fail_to_count(session: Capture) -> None:
    with session.counting():
        TrackWriter(session.launch("slow", grid=1, warps=1, events=TABLE).descriptor, 0, 0)


def fail_at_a_range(session: Capture) -> None:
    with session.range(None):
        pass


def fail_to_add_a_profile(session: Capture) -> None:
    session.add_torch_profile("there is none")


@pytest.mark.parametrize("fail", [fail_to_launch, fail_to_count, fail_at_a_range, fail_to_add_a_profile])
def test_after_a_failure_inside_nothing_more_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture, fail):
    with capture(tmp_path, on_error="warn") as session:
        with session.range("before"):
            launch(session)
        for _ in range(2):
            fail(session)
            assert not launch(session).traced
            with session.range("behind"):
                pass
        assert session.footprint_bytes > 0
    (told,) = caplog.messages
    assert told.startswith(f"capture {tmp_path}: ")
    assert told.endswith("; nothing more is recorded, the run goes on")
    timeline = load(tmp_path)
    assert timeline.host_names == ("before",)
    assert {entry.name for entry in timeline.launches} <= {"demo", "slow"}
    assert len([entry for entry in timeline.launches if entry.name == "demo"]) == 1
    (lost,) = [problem.text for problem in timeline.problems if problem.kind == "launch_not_recorded"]
    assert re.search(r"\d launches ran unrecorded; recording had failed: that run's warning says why", lost)
    with pytest.raises(BadInput, match="ran unrecorded"):
        load(tmp_path, strict=True)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt, SystemExit])
def test_what_the_program_raises_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type, on_error: str):
    def fail() -> None:
        with capture(tmp_path, on_error=on_error) as session, session.counting(), session.range("step"):
            raise error

    with pytest.raises(error):
        fail()
    assert caplog.messages == []
    assert load(tmp_path).host_names == ("step",)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_the_opening_passes_and_leaves_nothing(tmp_path: Path, run_id: str, error: type):
    def interrupted() -> None:
        raise error

    with pytest.raises(error), capture(tmp_path, on_error="warn", preload=[interrupted]):
        pytest.fail("it opened")
    assert not list_segments(run_id)
    assert open_capture() is None


def test_a_thread_that_launches_on_at_the_end_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    stop, raised = threading.Event(), list[BaseException]()

    def launch_on(session: Capture) -> None:
        try:
            while not stop.is_set():
                launch(session, grid=1, warps=1, spans=1)
        except BaseException as error:  # noqa: BLE001 - whatever it is
            raised.append(error)

    with capture(tmp_path, on_error="warn", clocks=False, max_bytes=1 << 26) as session:
        threads = [threading.Thread(target=launch_on, args=[session]) for _ in range(2)]
        for thread in threads:
            thread.start()
        launch(session)
    launch(session)
    stop.set()
    for thread in threads:
        thread.join()
    assert raised == []
    (told,) = [text for text in caplog.messages if "records" not in text.partition(": ")[2][:9]]
    assert "outside the capture's `with` block" in told
    load(tmp_path)


def test_a_fork_follows_the_guard_and_spoils_nothing(tmp_path: Path):
    with capture(tmp_path, on_error="warn") as session:
        child = os.fork()
        if child == 0:
            untraced = not any(launch(session).traced for _ in range(2))
            fail_to_launch(session)
            with capture(tmp_path / "own", on_error="warn") as own:
                untraced = untraced and not launch(own).traced
            session.__exit__(None, None, None)
            os._exit(0 if untraced else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert launch(session).traced
    assert len(load(tmp_path).launches) == 1
    assert not (tmp_path / "own").exists()


def test_a_capture_is_entered_and_left_once(tmp_path: Path):
    """The second run of the block replaced the first recording, and the second end was KeyError: None."""
    session = capture(tmp_path)
    with pytest.raises(BadInput, match="left twice, or was never entered"):
        session.__exit__(None, None, None)
    with session:
        launch(session)
        with pytest.raises(BadInput, match="a capture is entered once; call"), session:
            pass
        launch(session)
    with pytest.raises(BadInput, match="left twice"):
        session.__exit__(None, None, None)
    with pytest.raises(BadInput, match="a capture is entered once; call"), session:
        pass
    assert len(load(tmp_path).launches) == 2


def test_a_capture_that_could_not_open_may_be_entered_again(tmp_path: Path):
    session = capture(tmp_path)
    with locked(tmp_path, "another"), pytest.raises(BadInput, match="is writing its capture there"), session:
        pass
    with session:
        launch(session)
    assert len(load(tmp_path).launches) == 1


def test_with_warnings_a_capture_that_is_entered_twice_keeps_the_first_recording(tmp_path: Path, caplog):
    session = capture(tmp_path, on_error="warn")
    with session:
        launch(session)
    with session:
        assert not launch(session).traced
    session.__exit__(None, None, None)
    assert [text.partition(": ")[2].partition("; ")[0] for text in caplog.messages] == [
        f"{tmp_path}: a capture is entered once",
        f"{tmp_path}: the capture's `with` block is left twice, or was never entered",
    ]
    assert len(load(tmp_path).launches) == 1


class Watchdog:
    """A program's own limit, which raises wherever the program is."""

    def __call__(self, *_: object) -> None:
        raise TimeoutError("the program's limit is over")


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_what_a_handler_of_a_signal_raises_is_the_programs(tmp_path: Path, on_error: str, monkeypatch):
    """In a launch, and while a rank waits for others, where all else would be taken for their death."""
    watchdog = Watchdog()
    for handler in (watchdog, watchdog.__call__, lambda *_: watchdog()):
        before = signal.signal(signal.SIGALRM, handler)
        try:
            with pytest.raises(TimeoutError, match="the program's limit"), losing_peers(0):
                signal.raise_signal(signal.SIGALRM)
            with capture(tmp_path, on_error=on_error) as session:
                monkeypatch.setattr(session._launches, "take", lambda *_: signal.raise_signal(signal.SIGALRM))
                with pytest.raises(TimeoutError, match="the program's limit"):
                    launch(session)
                monkeypatch.undo()
                assert launch(session).traced
        finally:
            signal.signal(signal.SIGALRM, before)
    with pytest.raises(PeerLost, match="do not answer"), losing_peers(0):
        watchdog()  # without a signal it may be anything


def test_an_unknown_way_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="on_error='ignore': wanted 'raise' or 'warn'"):
        capture(tmp_path, on_error="ignore")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., list[list[str]]]]:
    """Runs a case of on_error_ranks.py on two ranks; returns how each ended, and what it printed but tracebacks."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with Spawner("tests.on_error_ranks:main", env) as spawner:

        def start(case: str, directory: Path, run_id: str, on_error: str = "warn") -> list[list[str]]:
            lines: list[list[str]] = [[], []]
            about = {
                **env,
                "TRACEKERN_GROUP_TIMEOUT_S": str(LIMIT_S if case in IN_VAIN else 120),
                "CASE": case,
                "CAPTURE": str(directory),
                "RUN": run_id,
                "ON_ERROR": on_error,
            }
            tell = lambda rank, line: lines[rank].append(line)  # noqa: E731
            ends = launch_ranks(2, spawner, env=about, on_line=tell, timeout_s=300)
            return [
                [str(end.returncode), *(line for line in told if not OF_TORCH.match(line))]
                for end, told in zip(ends, lines, strict=True)
            ]

        yield start


@pytest.mark.parametrize(
    ("case", "own", "others"),
    [
        ("argument", "every=0: wanted 1 or more", "rank 1: every=0: wanted 1 or more"),
        ("preload", "ArithmeticError: of a preload function", "rank 1: ArithmeticError: of a preload function"),
        ("no room", "segment tracekern-.*: no room in", "rank 1: segment tracekern-.*: no room in"),
        ("no extension", ".*tracekern._core", "rank 1: .*tracekern._core"),
        ("files", *["rank 1 needs 18 more open files and may open 4; raise the limit"] * 2),
        ("taken", "segment .*: already there", "rank 1: segment .*: already there"),
        ("stopped clock", "RuntimeError: the clock cannot be read", "clock samples: rank 0 lost the others"),
        ("no gpu", ".*GPU", "rank 0: the other ranks do not answer"),
    ],
)
def test_where_one_rank_cannot_open_all_run_untraced(ranks, tmp_path, run_id, case: str, own: str, others: str):
    taken = SHM_DIR / f"tracekern-{run_id}-1"
    if case == "taken":
        taken.touch(0o600)
    try:
        ended = ranks(case, tmp_path / "new", run_id)
    finally:
        taken.unlink(missing_ok=True)
    for (status, *lines), why in zip(ended, (others, own), strict=True):
        assert (status, lines.count("traced False")) == (str(OWN_EXIT), 2), ended
        (told,) = [line for line in lines if not line.startswith("traced ")]
        assert re.match(f"capture {tmp_path}/new: {why}", told), told
    assert not list_segments(run_id)


def test_so_do_all_resident_ranks(tmp_path: Path):
    def is_traced() -> bool:
        wrong = {"preload": [lambda: 1 // 0]} if rank_of_thread() == 1 else {}
        with capture(tmp_path / "new", device="cpu", on_error="warn", **wrong) as session:
            return launch(session).traced

    assert on_ranks(2, is_traced) == [False, False]


def test_a_rank_whose_peer_opens_nothing_runs_untraced_and_the_job_can_go_on(ranks, tmp_path, run_id):
    """Only rank 0 opens a capture. It counted one group more than rank 1 did, and the job's next new_group() failed."""
    first, second = ranks("never comes", tmp_path, run_id)
    assert second == [str(OWN_EXIT)]
    status, told, *rest = first
    assert (status, rest) == (str(OWN_EXIT), ["traced False"] * 2), first
    why = "rank 0: not all ranks open what this one opens: rank 1 did not come within 3 s"
    assert told.startswith(f"capture {tmp_path}: {why}")


def test_a_peer_that_is_killed_is_one_warning(ranks, tmp_path, run_id):
    first, second = ranks("killed", tmp_path, run_id)
    assert second[0] == "-9"
    status, *lines = first
    (told,) = [line for line in lines if not line.startswith("traced ")]
    assert (status, lines.count("traced True")) == (str(OWN_EXIT), 2)
    assert told.startswith(f"capture {tmp_path}: not all ranks closed")
    assert len(load(tmp_path, partial=True).launches) == 2


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("case", ["gone", "gone, error"])
def test_a_group_that_the_program_has_destroyed_is_no_fault(ranks, tmp_path, run_id, case: str, on_error: str):
    """ValueError: Invalid process group specified, in the place of the program's own error."""
    for status, *lines in ranks(case, tmp_path, run_id, on_error):
        assert status == (str(OWN_EXIT) if case == "gone" else "1")
        if case == "gone":
            assert lines == ["traced True"] * 2
        else:
            assert lines[:2] == ["traced True", "Traceback (most recent call last):"]
            assert lines[-1] == "RuntimeError: of the user"
            assert not [line for line in lines if "During handling" in line]
    assert {entry.rank for entry in load(tmp_path).launches} == {0, 1}
    assert len(json.loads((tmp_path / "capture.json").read_text())["ranks"]) == 2
