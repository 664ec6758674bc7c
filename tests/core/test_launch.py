"""Our own launcher with real processes: output, signals, time limits, and what a killed rank leaves."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.captures import EVENT_TABLE
from tests.kernels import TrackWriter
from tests.paths import ROOT
from tests.waiting import wait_until
from tracekern.dump.reader import read_dump
from tracekern.errors import BadInput
from tracekern.launcher.launch import RankExit, launch_ranks
from tracekern.launcher.spawner import Spawner
from tracekern.record.session import capture
from tracekern.segment.names import SHM_DIR
from tracekern.timeline.decode.decoder import decode
from tracekern.timeline.load import load
from tracekern.timeline.model import OPEN_END, TrackKind

ENDED = {"SIGTERM", "SIGKILL"}
"""The launcher's signals: the second one for a rank that a busy machine keeps from following the first."""


class Program:
    """A program text as a target: a command line, or a function in a module of its own."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.env = {"PYTHONPATH": f"{directory}:{ROOT}"}

    def target(self, text: str) -> list[str] | str:
        text = textwrap.dedent(text)
        if self.kind == "command":
            return [sys.executable, "-c", text]
        (self.directory / "program.py").write_text("def main():\n" + textwrap.indent(text, "    "))
        return "program:main"

    def run(self, num_ranks: int, text: str, **options) -> tuple[list, list[tuple[int, str]]]:
        lines: list[tuple[int, str]] = []
        env = {**self.env, **options.pop("env", {})}
        exits = launch_ranks(
            num_ranks, self.target(text), env=env, on_line=lambda rank, line: lines.append((rank, line)), **options
        )
        return exits, lines

    def launcher(self, num_ranks: int, text: str, options: str = "") -> list[str]:
        """The command of a launcher in a process of its own; it prints how the ranks ended."""
        call = f"launch_ranks({num_ranks}, {self.target(text)!r}, env={self.env!r}{options})"
        program = f"from tracekern.launcher.launch import launch_ranks; print([e.returncode for e in {call}])"
        return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {program}"]


@pytest.fixture(params=["command", "function"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Program:
    (tmp_path / "program").mkdir()
    return Program(request.param, tmp_path / "program")


@pytest.fixture
def function(tmp_path: Path) -> Program:
    return Program("function", tmp_path)


def record_until_killed() -> None:
    """Rank 1 tells of each record it has written, for its killer; other ranks close their captures."""
    with capture(os.environ["CAPTURE_DIR"], records_per_track=100_000, clocks=False) as session:
        launch = session.launch("endless", grid=1, warps=1, events=EVENT_TABLE)
        writer = TrackWriter(launch.descriptor, 0, 0)
        for number in range(10 if os.environ["RANK"] != "1" else 1_000_000):
            writer.span(1, number)
            writer.begin(3, number)  # a wait that never ends
            sys.stdout.write(f"wrote {writer.attempted}\n")
        writer.finish()


def test_ranks_get_the_environment_of_torchrun_and_their_lines_come_back(program: Program):
    exits, lines = program.run(
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


def test_the_callers_network_interface_wins(program: Program, monkeypatch: pytest.MonkeyPatch):
    told = "import os; print(os.environ['GLOO_SOCKET_IFNAME'])"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert program.run(1, told)[1] == [(0, "lo")]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "theirs")
    assert program.run(1, told)[1] == [(0, "theirs")]
    assert program.run(1, told, env={"GLOO_SOCKET_IFNAME": "ours"})[1] == [(0, "ours")]


SOCKETS = """
from tracekern.comm.ranks.group import Group
from tracekern.launcher.rendezvous import join_ranks
from tests.core.test_launch import listening_addresses
join_ranks()
group = Group.discover()
group.all_gather("")
print(*listening_addresses())
group.barrier()
"""


def listening_addresses() -> list[str]:
    """The addresses, in hexadecimal as the kernel has them, on which TCP sockets of this process listen."""
    own = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            own.add(os.readlink(path))
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()
    ]
    return [row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def test_ranks_listen_on_the_loopback_interface_only(function: Program, monkeypatch: pytest.MonkeyPatch):
    """The store of rank 0, and gloo of both. Without a choice of ours gloo takes the address of the host's name."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    exits, lines = function.run(2, SOCKETS, timeout_s=300)
    assert [end.returncode for end in exits] == [0, 0], lines
    addresses = {rank: line.split() for rank, line in lines}
    assert len(addresses[0]) == len(addresses[1]) + 1, "the store"
    assert addresses[1], "gloo"
    assert {*addresses[0], *addresses[1]} == {"0100007F"}


def test_targets_that_cannot_be_started_are_told(function: Program):
    with pytest.raises(BadInput, match="module:function"):
        launch_ranks(2, "import os; os._exit")
    with pytest.raises(BadInput, match="cannot be started"):
        launch_ranks(1, ["/nonexistent/program"])
    with pytest.raises(BadInput, match="a list of words"):
        launch_ranks(1, [])
    with pytest.raises(BadInput, match="cannot be imported .ModuleNotFoundError: No module named 'nonexistent'"):
        launch_ranks(2, "nonexistent:main")
    with pytest.raises(BadInput, match="AttributeError: .* has no attribute 'nonexistent'"):
        launch_ranks(2, "platform:nonexistent")


def test_a_function_ends_like_a_program(function: Program):
    exits, lines = function.run(
        6,
        """
        import atexit, os, signal, sys, threading, time
        rank = int(os.environ["RANK"])
        atexit.register(print, "at exit")
        if rank == 5: os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        if rank == 1: return 3
        if rank == 2: sys.exit("sorry")
        if rank == 3: raise ValueError("wrong")
        if rank == 4: raise KeyboardInterrupt
        """,
    )
    assert [end.returncode for end in exits] == [0, 3, 1, 1, -signal.SIGINT, -signal.SIGKILL]
    said = [[line for rank, line in lines if rank == wanted] for wanted in range(6)]
    assert [texts[-2:] for texts in said] == [["thread", "at exit"]] * 5 + [[]]
    assert [len(texts) for texts in said[:3]] == [2, 2, 3]
    assert "sorry" in said[2]
    assert "ValueError: wrong" in said[3]
    assert "KeyboardInterrupt" in said[4]


@pytest.mark.parametrize("in_spawner", ["", "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"])
def test_an_interrupt_while_modules_are_imported_ends_ranks_without_a_word(function: Program, in_spawner: str):
    """In the warm process; or, where the module starts threads, in the ranks."""
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    text = f"if 'RANK' in os.environ: {interrupt}\nelse: {in_spawner or interrupt}\n"
    text = f"import os, signal, threading, time\n{text}def main(): pass\n"
    (function.directory / "module.py").write_text(text)
    lines: list[str] = []
    exits = launch_ranks(2, "module:main", env=function.env, on_line=lambda _, line: lines.append(line))
    assert ([end.returncode for end in exits], lines) == ([-signal.SIGINT] * 2, [])


def test_the_module_of_a_function_is_imported_once(function: Program):
    (function.directory / "module.py").write_text(
        """
import os, numpy, random
print("imported")
before = os.getpid()
def main():
    print(before, os.getppid(), numpy.random.random(), random.random())
"""
    )
    lines: list[tuple[int, str]] = []
    started: list[tuple[int, int]] = []
    exits = launch_ranks(
        3,
        "module:main",
        env=function.env,
        on_line=lambda rank, line: lines.append((rank, line)),
        on_start=lambda rank, pid: started.append((rank, pid)),
    )
    assert sorted(started) == [(end.rank, end.pid) for end in exits]
    assert [(rank, line) for rank, line in lines if line == "imported"] == [(0, "imported")]
    words = [line.split() for _, line in lines if line != "imported"]
    assert len(words) == 3
    assert len({word for before, parent, *_ in words for word in (before, parent)}) == 1
    assert len({numbers for *_, number, other in words for numbers in (number, other)}) == 6


def test_runs_that_share_a_spawner_import_once_and_have_their_own_environment(function: Program):
    (function.directory / "module.py").write_text(
        """
import os, signal
print("imported")
def main():
    print(os.getppid(), os.environ.get("GIVEN"), flush=True)
    if os.environ["RANK"] == os.environ.get("DIES"): os.kill(os.getpid(), signal.SIGKILL)
    return int(os.environ.get("GIVEN", 0))
"""
    )
    runs = [({"GIVEN": "5"}, [5, 5]), ({"DIES": "1"}, [0, -signal.SIGKILL]), ({"GIVEN": "6"}, [6, 6])]
    parents, pids = set(), []
    with Spawner("module:main", {**os.environ, **function.env}) as spawner:
        for number, (env, ends) in enumerate(runs):
            lines: list[tuple[int, str]] = []
            exits = launch_ranks(2, spawner, env=env, on_line=lambda *line, lines=lines: lines.append(line))
            assert [end.returncode for end in exits] == ends
            assert [line for line in lines if line[1] == "imported"] == [(0, "imported")] * (number == 0)
            said = sorted((rank, *line.split()) for rank, line in lines if line != "imported")
            assert [(rank, given) for rank, _, given in said] == [(rank, env.get("GIVEN", "None")) for rank in range(2)]
            parents |= {parent for _, parent, _ in said}
            pids += [end.pid for end in exits]
            known = [Path(f"/proc/{pid}").exists() for pid in pids]
            assert known == [False] * (2 * number) + [True] * 2, "ids stay taken until the next run, no longer"
    assert len(parents) == 1
    gone = {*pids, int(parents.pop())}
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in gone))


def test_a_spawner_that_was_killed_between_runs_is_told_by_the_next(function: Program):
    target = function.target("import os; print(os.getppid())")
    said: list[str] = []
    with Spawner(target, {**os.environ, **function.env}) as spawner:
        assert [end.returncode for end in launch_ranks(2, spawner, on_line=lambda _, line: said.append(line))] == [0, 0]
        os.kill(int(said[0]), signal.SIGKILL)
        os.waitid(os.P_PID, int(said[0]), os.WEXITED | os.WNOWAIT)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spawner._process, "poll", lambda: None)  # as if it died a moment later
            exits = launch_ranks(2, spawner)
        assert [end.signal_name for end in exits] == ["SIGKILL", "SIGKILL"]
        assert [end.returncode for end in launch_ranks(2, spawner)] == [0, 0]  # a new one was started
        with pytest.raises(BadInput, match="300 ranks of program:main: wanted at most 250"):
            launch_ranks(300, spawner)


def test_a_module_that_starts_threads_is_imported_by_each_rank(function: Program):
    (function.directory / "module.py").write_text(
        """
import os, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
before = os.getpid()
def main():
    print(os.environ["RANK"], before == os.getpid(), threading.active_count())
    return 4
"""
    )
    lines: list[tuple[int, str]] = []
    exits = launch_ranks(2, "module:main", env=function.env, on_line=lambda *line: lines.append(line))
    assert [end.returncode for end in exits] == [4, 4]
    assert sorted(lines) == [(0, "0 True 2"), (1, "1 True 2")]


def test_ctrl_c_and_limits_hold_while_the_module_is_imported(function: Program):
    (function.directory / "module.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)")
    exits = launch_ranks(2, "module:main", env=function.env, timeout_s=1, on_line=lambda *line: None)
    assert {end.signal_name for end in exits} <= ENDED
    assert [end.stopped for end in exits] == [True, True]

    call = f"launch_ranks(2, 'module:main', env={function.env!r})"
    program = f"from tracekern.launcher.launch import launch_ranks; print([e.returncode for e in {call}])"
    launcher = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert "importing" in launcher.stdout.readline()
    launcher.send_signal(signal.SIGINT)
    assert "[-2, -2]" in launcher.stdout.read()
    launcher.wait(60)


def test_ranks_end_with_the_process_they_were_forked_from(function: Program):
    pids: dict[int, int] = {}

    def kill_parent(_rank: int, line: str) -> None:
        if line.isdecimal():
            os.kill(int(line), signal.SIGKILL)

    text = "import os, time; print(os.getppid() if os.environ['RANK'] == '0' else '', flush=True); time.sleep(600)"
    exits = launch_ranks(
        2, function.target(text), env=function.env, on_line=kill_parent, on_start=pids.__setitem__, kill_after_s=30
    )
    assert [end.signal_name for end in exits] == ["SIGKILL", "SIGKILL"]
    # Nobody can wait for the children of a process that is gone.
    wait_until(lambda: not any(is_running(pid) for pid in pids.values()))


@pytest.mark.parametrize(
    ("dies", "code", "more_s", "is_stopped"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, 0.5, False),
        ("os._exit(3)", 3, 0.5, False),
        ("os._exit(3)", 3, 600, True),
    ],
)
def test_when_a_rank_dies_the_others_get_their_time_and_no_more(
    program: Program, dies: str, code: int, more_s: float, is_stopped: bool
):
    exits, lines = program.run(
        2,
        f"""
        import os, time, signal
        if os.environ["RANK"] == "0": {dies}
        time.sleep({more_s})
        print("ended by itself")
        """,
        kill_after_s=1 if is_stopped else 300,
    )
    assert [end.stopped for end in exits] == [False, is_stopped]
    assert exits[0].returncode == code
    assert exits[1].signal_name in (ENDED if is_stopped else {""})
    assert lines == ([] if is_stopped else [(1, "ended by itself")])


def test_a_second_capture_in_the_place_of_the_first_leaves_nothing_behind(program: Program, tmp_path: Path, caplog):
    text = f"""
    from tracekern.record.session import capture
    for _ in range(2):
        with capture({str(tmp_path / "capture")!r}, max_bytes=1 << 20) as session:
            pass
    print(session.run_id)
    """
    exits, lines = program.run(1, text)
    assert [end.returncode for end in exits] == [0]
    (second,) = [line for _, line in lines]
    assert second.endswith(".1")
    assert read_dump(tmp_path / "capture" / "rank_00000.tkdump").run_id == second
    assert load(tmp_path / "capture").ranks[0].state == "closed"
    assert not list(SHM_DIR.glob(f"tracekern-{second.removesuffix('.1')}*"))
    assert not caplog.records


def test_the_whole_run_has_a_limit(program: Program):
    exits, _ = program.run(2, "import time; time.sleep(600)", timeout_s=1)
    assert {end.signal_name for end in exits} <= ENDED


def test_ranks_do_not_outlive_a_killed_launcher(program: Program, tmp_path: Path):
    note = f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid()))"
    rank = f"import os, time; {note}; time.sleep(600)"
    launcher = subprocess.Popen(program.launcher(2, rank))
    wait_until(lambda: all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(2)))
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_signal_that_ends_a_rank_has_a_name():
    names = [RankExit(0, 1, -number, False, False).signal_name for number in range(1, 65)]
    assert (names[8], names[31], names[33], names[39], names[63]) == (
        *("SIGKILL", "signal 32", "SIGRTMIN", "signal 40", "SIGRTMAX"),
    )
    (end,) = launch_ranks(1, [sys.executable, "-c", "import os; os.kill(os.getpid(), 40)"])
    assert end.signal_name == "signal 40"


def test_every_record_before_a_sigkill_is_salvaged(program: Program, tmp_path: Path):
    """The killer knows how many records the rank had told of when the signal was sent: all of them have to be there."""
    told = killed_at = 0
    pids: dict[int, int] = {}
    lock, is_started = threading.Lock(), threading.Event()

    def on_start(rank: int, pid: int) -> None:
        pids[rank] = pid
        if rank == 1:
            is_started.set()

    def on_line(rank: int, line: str) -> None:
        nonlocal told, killed_at
        if rank == 1 and (match := re.fullmatch(r"wrote (\d+)", line)):
            is_started.wait()
            with lock:
                told = int(match[1])
                if told >= 3000 and not killed_at:
                    killed_at = told
                    os.kill(pids[1], signal.SIGKILL)

    target = program.target("from tests.core.test_launch import record_until_killed as r; r()")
    env = {**program.env, "CAPTURE_DIR": str(tmp_path)}
    before = set(SHM_DIR.glob("tracekern-*"))
    exits = launch_ranks(2, target, env=env, on_line=on_line, on_start=on_start, timeout_s=300)

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
    assert len(spans) == dump.launches[0].records_count // 2
    copies = timeline.spans.take(timeline.spans.event != waits[0])
    launches = [track.kind == TrackKind.LAUNCH for track in timeline.tracks]
    copies = copies.take([not launches[track] for track in copies.track.tolist()])
    assert (copies.begin_payload == range(len(copies))).all()

    whole = load(tmp_path, unaligned=True)
    assert [rank.state for rank in whole.ranks] == ["closed", "salvaged"]
    assert {p.rank for p in whole.problems if p.kind == "salvaged"} == {1}
