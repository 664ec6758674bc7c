"""Our own launcher with real processes: output, signals, time limits, and what a killed rank leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.captures import EVENT_TABLE
from tests.kernels import TrackWriter
from tracekern.errors import BadInput
from tracekern.record.dump import read_dump
from tracekern.record.launch import launch_ranks
from tracekern.record.segment import SHM_DIR
from tracekern.record.session import capture
from tracekern.timeline.decode import decode
from tracekern.timeline.merge import load
from tracekern.timeline.model import OPEN_END, TrackKind

ROOT = Path(__file__).resolve().parent.parent


def python(text: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(text)]


def run(num_ranks: int, text: str, **options) -> tuple[list, list[tuple[int, str]]]:
    lines: list[tuple[int, str]] = []
    exits = launch_ranks(num_ranks, python(text), on_line=lambda rank, line: lines.append((rank, line)), **options)
    return exits, lines


def record_until_killed() -> None:
    """Rank 1 tells of each record it has written, for its killer; other ranks close their captures."""
    with capture(os.environ["CAPTURE_DIR"], records_per_track=100_000, clocks=False) as session:
        launch = session.launch("endless", grid=1, warps=1, events=EVENT_TABLE)
        writer = TrackWriter(launch.descriptor, 0, 0)
        for number in range(10 if os.environ["RANK"] != "1" else 1_000_000):
            writer.span(1, number)
            writer.record(1, 3, number)  # a wait that never ends
            sys.stdout.write(f"wrote {writer.written}\n")
        writer.finish()


def test_ranks_get_the_environment_of_torchrun_and_their_lines_come_back():
    exits, lines = run(
        3,
        """
        import os
        print(os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"])
        print(os.environ["TRACEKERN_RUN_ID"], os.environ["MASTER_PORT"], os.environ["EXTRA"])
        """,
        env={"EXTRA": "more"},
    )
    assert [end.returncode for end in exits] == [0, 0, 0]
    assert sorted(line for _, line in lines if "127.0.0.1" in line) == [
        f"{rank} {rank} 3 127.0.0.1" for rank in range(3)
    ]
    rest = {line for _, line in lines if "more" in line}
    assert len(rest) == 1


def test_a_function_can_be_the_target(capfd: pytest.CaptureFixture):
    exits = launch_ranks(2, "platform:node")
    assert [end.returncode for end in exits] == [0, 0]
    with pytest.raises(BadInput, match="module:function"):
        launch_ranks(2, "import os; os._exit")
    with pytest.raises(BadInput, match="cannot be started"):
        launch_ranks(1, ["/nonexistent/program"])


def test_when_a_rank_dies_the_others_get_their_time_and_no_more():
    exits, lines = run(
        3,
        """
        import os, time, signal
        rank = int(os.environ["RANK"])
        if rank == 0: os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5 if rank == 1 else 600)
        print("ended by itself")
        """,
        kill_after_s=3,
    )
    assert [end.signal_name for end in exits] == ["SIGKILL", "", "SIGTERM"]
    assert [end.stopped for end in exits] == [False, False, True]
    assert lines == [(1, "ended by itself")]


def test_the_whole_run_has_a_limit():
    exits, _ = run(2, "import time; time.sleep(600)", timeout_s=1)
    assert [end.signal_name for end in exits] == ["SIGTERM", "SIGTERM"]


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path):
    note = f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid()))"
    rank = f"import os, time; {note}; time.sleep(600)"
    text = f"from tracekern.record.launch import launch_ranks; launch_ranks(2, {[sys.executable, '-c', rank]!r})"
    launcher = subprocess.Popen(python(text))
    while not all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(2)):
        assert launcher.poll() is None
        time.sleep(0.05)
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ctrl_c_reaches_every_rank():
    text = """
        import os, time
        try: print("ready", flush=True); time.sleep(600)
        except KeyboardInterrupt: print("interrupted", flush=True); raise SystemExit(7)
        """
    launcher = subprocess.Popen(
        python(
            f"from tracekern.record.launch import launch_ranks\n"
            f"print([e.returncode for e in launch_ranks(2, {python(text)!r})])"
        ),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    seen = [launcher.stdout.readline() for _ in range(2)]
    assert all("ready" in line for line in seen)
    launcher.send_signal(signal.SIGINT)
    rest = launcher.stdout.read()
    assert launcher.wait(timeout=60) == 0
    assert rest.count("interrupted") == 2
    assert "[7, 7]" in rest


def test_every_record_before_a_sigkill_is_salvaged(tmp_path: Path):
    """The killer knows how many records the rank had told of when the signal was sent: all of them have to be there."""
    told = killed_at = 0
    pid: list[int] = []
    lock = threading.Lock()

    def on_line(rank: int, line: str) -> None:
        nonlocal told, killed_at
        if rank == 1 and (match := re.fullmatch(r"wrote (\d+)", line)):
            with lock:
                told = int(match[1])
                if told >= 3000 and not killed_at:
                    killed_at = told
                    os.kill(pid[0], signal.SIGKILL)
        elif rank == 1 and line.startswith("pid "):
            pid.append(int(line[4:]))

    text = "import os; print('pid', os.getpid()); from tests.test_launch import record_until_killed as r; r()"
    before = set(SHM_DIR.glob("tracekern-*"))
    exits = launch_ranks(2, python(text), env={"CAPTURE_DIR": str(tmp_path)}, on_line=on_line, timeout_s=120)

    assert exits[1].signal_name == "SIGKILL"
    assert [end.salvaged for end in exits] == [False, True]
    assert not [path for path in set(SHM_DIR.glob("tracekern-*")) - before if f"{os.getpid()}-" in path.name]
    dump = read_dump(tmp_path / "rank_00001.tkdump")
    assert dump.metadata["state"] == "salvaged"
    assert dump.launches[0].records_count >= killed_at >= 3000

    timeline = decode(dump)
    waits = [idx for idx, event in enumerate(timeline.events) if event.name == "wait_token"]
    spans = timeline.spans.take(timeline.spans.event == waits[0])
    assert (spans.end == OPEN_END).all()
    assert (spans.begin_payload == range(len(spans))).all()
    assert len(spans) == dump.launches[0].records_count // 3
    copies = timeline.spans.take(timeline.spans.event != waits[0])
    launches = [track.kind == TrackKind.LAUNCH for track in timeline.tracks]
    copies = copies.take([not launches[track] for track in copies.track.tolist()])
    assert (copies.begin_payload == range(len(copies))).all()

    whole = load(tmp_path, unaligned=True)
    assert [rank.state for rank in whole.ranks] == ["closed", "salvaged"]
    assert {p.rank for p in whole.problems if p.kind == "salvaged"} == {1}
