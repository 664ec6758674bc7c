"""tracekern.start() and stop(): a part of what a server launches, asked for by a request that it handles."""

from __future__ import annotations

import http.server
import itertools
import logging
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_resident import on_ranks

import tracekern
from tests.kernels import run_kernel
from tests.sessions import TABLE
from tracekern.comm.ranks.group import Group
from tracekern.record import from_outside
from tracekern.timeline.load import load


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    yield
    for window in from_outside._windows.values():
        window.end()
    from_outside._windows.clear()


def step(name: str = "demo", key: str = "") -> bool:
    launch = tracekern.launch(name, grid=1, warps=1, events=TABLE, key=key)
    if launch.traced:
        run_kernel(launch.descriptor, 1, 1, 2)
    return launch.traced


def test_a_number_of_launches_is_recorded_then_none(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert not step()
    assert tracekern.start(tmp_path / "window", launches=3, every=2) == tmp_path / "window"
    assert [step() for _ in range(7)] == [True, False, True, False, True, False, False]
    assert len(load(tmp_path / "window").launches) == 3, "it is saved already"
    assert caplog.messages == []
    assert tracekern.stop() == tmp_path / "window"
    assert tracekern.stop() is None
    assert [message.partition(": ")[0] for message in caplog.messages] == ["tracekern.stop()"]
    assert tracekern.start(tmp_path / "next") == tmp_path / "next"
    assert [step() for _ in range(6)] == [True] * 6
    assert tracekern.start(tmp_path / "last") == tmp_path / "last"
    assert len(load(tmp_path / "next").launches) == 6
    assert step("last")
    assert tracekern.stop() == tmp_path / "last"
    assert not step()
    assert [launch.name for launch in load(tmp_path / "last").launches] == ["last"]


STOP_IN_A_HANDLER = """
import faulthandler, json, signal, sys
import tracekern
faulthandler.dump_traceback_later(30, exit=True)
events = json.dumps({"name": "E", "events": [{"name": "a", "class": "work", "ends_at": "completion", "channel": "",
                                              "begin_fields": "", "end_fields": ""}]})
stopped = []
signal.signal(signal.SIGALRM, lambda *_: stopped.append(tracekern.stop()))
for number in range(20):
    stopped.clear()
    tracekern.start(f"{sys.argv[1]}/{number}", records_per_track=4, device="cpu", max_bytes=1 << 26)
    tracekern.launch("k", grid=1, warps=1, events=events)
    signal.setitimer(signal.ITIMER_REAL, 0.001 + number * 0.0003)
    while not stopped:
        tracekern.launch("k", grid=1, warps=1, events=events)
    tracekern.launch("k", grid=1, warps=1, events=events)
    assert str(stopped[0]).endswith(f"/{number}"), stopped
"""


def test_a_signals_handler_may_stop_what_it_interrupts(tmp_path: Path):
    """Most of the time a launch."""
    subprocess.run([sys.executable, "-c", STOP_IN_A_HANDLER, str(tmp_path)], check=True, timeout=60)
    assert all(len(load(tmp_path / str(number)).launches) > 1 for number in range(20))


class Handler(http.server.BaseHTTPRequestHandler):
    """/start/DIRECTORY, and /stop."""

    def do_GET(self) -> None:
        path = self.path.removeprefix("/start")
        directory = tracekern.stop() if path == "/stop" else tracekern.start(path, max_bytes=1 << 26)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(directory).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def ask() -> Iterator:
    """Sends a request to a server of this process, which handles each in a thread of its own."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        where = f"http://127.0.0.1:{server.server_address[1]}"
        yield lambda path: urllib.request.urlopen(where + path, timeout=60).read().decode()
        server.shutdown()


def test_requests_start_and_stop_it_while_another_thread_launches(tmp_path: Path, ask, caplog):
    is_over, counts = threading.Event(), {True: 0, False: 0}

    def serve() -> None:
        while not is_over.wait(0.001):
            counts[step()] += 1

    engine = threading.Thread(target=serve)
    engine.start()
    for name in ("a", "b"):
        before = counts[True]
        assert ask(f"/start{tmp_path}/{name}") == f"{tmp_path}/{name}"
        while counts[True] < before + 5:
            pass
        assert ask("/stop") == f"{tmp_path}/{name}"
        assert len(load(tmp_path / name, strict=True).launches) == counts[True] - before
    is_over.set()
    engine.join()
    assert ask("/stop") == "None"
    assert len(caplog.messages) == 1


def test_a_server_without_work_is_stopped_by_the_request_itself(tmp_path: Path, ask):
    ask(f"/start{tmp_path}/window")
    step()
    assert ask("/stop") == f"{tmp_path}/window"
    assert len(load(tmp_path / "window").launches) == 1
    ask(f"/start{tmp_path}/nothing")
    assert ask("/stop") == "None"
    assert not step()
    assert not (tmp_path / "nothing").exists()


def test_what_fails_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def told() -> str:
        (line,) = caplog.messages
        caplog.clear()
        return line

    assert tracekern.start(tmp_path / "window", evry=2) is None
    assert "unexpected keyword argument 'evry'" in told()
    assert tracekern.start(tmp_path / "window", launches=0) is None
    assert told() == f"capture {tmp_path}/window: start(launches=0): wanted 1 or more; nothing is recorded"
    with tracekern.capture(tmp_path / "own"):
        assert tracekern.start(tmp_path / "window") is None
        assert told() == (
            f"capture {tmp_path}/window: a capture into {tmp_path}/own is open; close it first; nothing is recorded"
        )
        assert step()
    (tmp_path / "file").touch()
    assert tracekern.start(tmp_path / "file" / "window")
    assert not step()
    assert "cannot be written" in told()
    assert not step()
    assert tracekern.stop() is None


def record_a_window(group: Group, directory: str, num_others: int) -> list[str]:
    """Each rank hears of it at another step. num_others: launches of rank 1 before its first step."""
    logging.getLogger("tracekern").setLevel(logging.ERROR)
    for _ in range(group.rank * num_others):
        step("other")
    traced: list[str] = []
    for number in itertools.count():
        if number == 2 + 5 * group.rank:
            tracekern.start(directory, launches=2)
        if step("inside", f"step {number}"):
            traced.append(f"step {number}")
        elif traced:
            assert tracekern.stop() == Path(directory)
            return traced
        time.sleep(0.002)
    raise AssertionError


@pytest.mark.parametrize("num_others", [0, 3])
def test_all_ranks_record_the_same_window(tmp_path: Path, pools, num_others: int):
    pool = pools(2)
    for name in ("first", "second"):
        ours, theirs = pool.call(record_a_window, str(tmp_path / name), num_others)
        assert ours == theirs
        timeline = load(tmp_path / name, strict=True)
        assert [(launch.rank, launch.key) for launch in timeline.launches] == [(r, key) for r in (0, 1) for key in ours]
        assert not [problem for problem in timeline.problems if problem.kind == "unequal_keys"]


def hear_of_it_alone(group: Group, directory: str) -> list[str]:
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("tracekern").setLevel(logging.WARNING)
    logging.getLogger("tracekern").addHandler(handler)
    if group.rank == 0:
        tracekern.start(directory)
        assert not any(step() for _ in range(3))
        assert tracekern.stop() is None
    group.barrier()  # until then rank 1 launches nothing
    logging.getLogger("tracekern").removeHandler(handler)
    return told


def test_a_rank_that_alone_hears_of_it_goes_on_and_says_so(tmp_path: Path, pools):
    told = f"capture {tmp_path}: nothing was recorded: 1 of 2 ranks have not called tracekern.start()"
    assert pools(2).call(hear_of_it_alone, str(tmp_path)) == [[told], []]


def record_other_steps(group: Group, directory: str) -> None:
    with tracekern.capture(directory, device="cpu", max_bytes=1 << 20) as capture:
        for number in range(2):
            launch = capture.launch("k", grid=1, warps=1, events=TABLE, key=f"step {number + 2 * group.rank}")
            run_kernel(launch.descriptor, 1, 1, 2)


def test_launches_of_one_number_and_other_keys_are_told(tmp_path: Path, pools):
    pools(2).call(record_other_steps, str(tmp_path))
    (told,) = [problem for problem in load(tmp_path).problems if problem.kind == "unequal_keys"]
    assert (told.severity, told.count) == ("note", 2)
    assert told.text == (
        "launch 0 of k is 'step 0' on rank 0 and 'step 2' on rank 1, and so is another one: ranks are compared launch "
        "by launch, whatever the keys; tracekern.start() begins at one that all have in common"
    )


def test_so_do_ranks_that_are_threads_of_one_process(tmp_path: Path):
    def record() -> list[bool]:
        tracekern.start(tmp_path / "window", launches=2, device="cpu")
        return [step("inside") for _ in range(3)]

    assert on_ranks(2, record) == [[True, True, False]] * 2
    assert [launch.rank for launch in load(tmp_path / "window", strict=True).launches] == [0, 0, 1, 1]
