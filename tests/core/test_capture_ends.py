"""What captures leave behind: nothing open, nothing half-closed, nothing recorded that was not selected."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.sessions import launch
from tests.warm_ranks import run_ranks
from tracekern.comm.ranks.group import Group
from tracekern.errors import BadInput
from tracekern.moe.experts import draw_experts
from tracekern.moe.p2p.pipeline import P2PPipeline
from tracekern.moe.routing import draw_batch
from tracekern.moe.shape import MoeShape
from tracekern.record.session import Capture, capture
from tracekern.segment.names import list_segments
from tracekern.segment.salvage import salvage_run
from tracekern.timeline.load import load
from tracekern.timeline.model import TrackKind


@pytest.mark.parametrize("nothing", [{"blocks": slice(4, 2)}, {"blocks": slice(9, 12)}, {"roles": []}, {"events": ()}])
def test_a_selection_of_nothing_records_nothing(tmp_path: Path, nothing: dict):
    """By the real recorder: blocks that stop before they start once let nearly all of them write anywhere."""
    shape = MoeShape(num_ranks=1, max_tokens=4, num_experts=4, topk=2, hidden=8, dtype="fp32")
    pipeline = P2PPipeline(Group(0, 1), shape, "balanced", num_blocks=8, warps_per_block=2)
    batch = draw_batch(shape, seed=1, rank=0, iteration=0, routing="uniform", uneven=False)
    with capture(tmp_path, device=pipeline.comm.device, **nothing) as session:
        for _ in range(2):
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, draw_experts(shape), capture=session)
    timeline = load(tmp_path)
    assert len(timeline.launches) == 8
    assert not timeline.tracks_of(TrackKind.DEVICE)[timeline.spans.track].any()


def test_a_range_may_end_behind_its_capture(tmp_path: Path):
    with capture(tmp_path) as session:
        outlives = session.range("outlives")
        outlives.__enter__()
        with session.range("inside"):
            launch(session)
    outlives.__exit__(None, None, None)
    assert load(tmp_path).host_names == ("inside",)


def test_a_kernel_that_outlives_its_capture_crashes_nothing(tmp_path: Path):
    """One of two launches is through when the capture closes; what the other writes then has its memory still."""
    program = f"""
import gc
from tests.kernels import TrackWriter
from tests.sessions import TABLE, launch
from tracekern.record.session import capture
with capture({str(tmp_path)!r}) as session:
    launch(session)
    hangs = TrackWriter(session.launch("hangs", grid=1, warps=1, events=TABLE).descriptor, 0, 0)
del session
gc.collect()
hangs.finish()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [launch.name for launch in load(tmp_path).launches] == ["demo", "hangs"]


def test_ranges_of_other_threads_spoil_no_dump(tmp_path: Path):
    """They end while the capture closes, and between the moment it counts them and the one it writes them."""
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        with capture(directory, host_spans=200_000) as session:
            threads = [threading.Thread(target=make_ranges, args=(session,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join(60)
        assert load(directory).host_names == ("hurry",)


def test_a_thread_that_launches_on_while_its_capture_closes_is_told_of_that_alone(tmp_path: Path):
    """Its launch found the segment half closed, once in four times: Bad file descriptor."""
    raised: list[BaseException] = []

    def launch_on(session: Capture) -> None:
        try:
            while True:
                launch(session, grid=1, warps=1, spans=1)
        except Exception as error:  # noqa: BLE001 - whatever it is
            raised.append(error)

    for _ in range(40):
        with capture(tmp_path, clocks=False, max_bytes=1 << 26) as session:
            thread = threading.Thread(target=launch_on, args=[session])
            thread.start()
            time.sleep(0.01)
        thread.join()
        load(tmp_path)
    assert {(type(error), str(error).partition("outside ")[2]) for error in raised} == {
        (BadInput, "the capture's `with` block")
    }


@pytest.mark.parametrize("name", [None, 3, "a\udcff"])
def test_a_range_without_a_name_is_refused_before_its_body(tmp_path: Path, name: object):
    with capture(tmp_path) as session, pytest.raises(BadInput, match="wanted a name"), session.range(name):
        pytest.fail("the body ran")
    assert load(tmp_path).host_names == ()


def test_a_fork_records_nothing_and_spoils_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It shares the rank's regions: what it took was taken again by the rank, and both wrote there."""
    with capture(tmp_path) as session:
        launch(session)
        child = os.fork()
        if child == 0:
            is_silent = True
            with session.counting(), session.range("of the fork"):
                is_silent = not any(launch(session).traced for _ in range(3))
            session.sample_clocks()
            with (
                pytest.raises(BadInput, match="is open; this is a fork of its rank"),
                capture(tmp_path / "own"),
            ):
                pass
            os._exit(0 if is_silent and len(told_of_forks(caplog)) == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not told_of_forks(caplog)
        launch(session)
    timeline = load(tmp_path)
    assert timeline.problems == ()
    assert [entry.sequence for entry in timeline.launches] == [0, 1]
    assert timeline.host_names == ()


def told_of_forks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "in a fork of its rank" in text]


def make_ranges(session: Capture) -> None:
    """Until the capture is closed."""
    with contextlib.suppress(BadInput):
        while True:
            with session.range("hurry"):
                pass


def test_a_capture_that_is_interrupted_while_it_closes_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    session = capture(tmp_path / "first").__enter__()
    launch(session)
    with monkeypatch.context() as patch:
        patch.setattr(session.device.streams, "is_idle_within", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.__exit__(None, None, None)
    assert list_segments(session.run_id), "what was recorded is still there"
    salvage_run(session.run_id)
    assert len(load(tmp_path / "first").launches) == 1
    with capture(tmp_path / "next") as following:
        launch(following)
    assert len(load(tmp_path / "next").launches) == 1


MANY_CAPTURES = """
import gc, os, sys
sys.path.insert(0, {root!r})
import torch.distributed as dist
from tests.sessions import launch
from tracekern.record.session import capture
dist.init_process_group("gloo")
for turn in range(4):
    with capture({directory!r}) as session:
        launch(session)
    del session
    gc.collect()
    dist.barrier()
    links = [f"/proc/self/fd/{{fd}}" for fd in os.listdir("/proc/self/fd")]
    files = [os.readlink(link) for link in links if os.path.lexists(link)]  # not that of the listing itself
    print("open", len(files), len(os.listdir("/proc/self/task")), sum("deleted" in name for name in files), flush=True)
    dist.barrier()
dist.destroy_process_group()
"""


def test_captures_of_ranks_leave_nothing_open(tmp_path: Path):
    """Neither files nor threads, and no segment of a peer, however many captures a job makes."""
    codes, lines = run_ranks(3, MANY_CAPTURES.format(root=str(ROOT), directory=str(tmp_path)))
    assert codes == [0, 0, 0], lines
    for rank in range(3):
        seen = [line.split()[1:] for of, line in lines if of == rank and line.startswith("open ")]
        assert len(seen) == 4
        assert seen[1] == seen[2] == seen[3], "files, threads, and files that were deleted"
        assert seen[3][2] == "0"
