"""Ranks that die inside a wait: how long it lasted is known, since who sees a rank end stamps the time."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from tests.captures import EVENT_TABLE
from tests.kernels import TrackWriter
from tests.paths import ROOT
from tracekern.analysis.findings import analyze
from tracekern.analysis.questions.hang import find_hang
from tracekern.dump.reader import peek_metadata
from tracekern.launcher.launch import launch_ranks
from tracekern.launcher.rendezvous import join_ranks
from tracekern.record.session import capture
from tracekern.timeline.load import load
from tracekern.viewers.report.headlines import headlines

WAIT = 3


def wait_for_each_other() -> None:
    """Two ranks, of which rank 0 is killed after a second, and rank 1 hangs until the launcher ends it."""
    join_ranks()
    rank = int(os.environ["RANK"])
    with capture(os.environ["CAPTURE_DIR"]) as session:
        launch = session.launch("endless", grid=1, warps=1, events=EVENT_TABLE)
        writer = TrackWriter(launch.descriptor, 0, 0)
        writer.span(1)
        writer.begin(WAIT, 1 - rank)
        session.group.barrier()  # both wait by now
        time.sleep(1)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


def test_the_last_waits_of_dead_ranks_lasted_until_they_died(tmp_path: Path):
    env = {"CAPTURE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    exits = launch_ranks(2, "tests.core.test_death:wait_for_each_other", env=env, kill_after_s=0.5, timeout_s=300)
    assert [end.salvaged for end in exits] == [True, True]
    assert exits[0].signal_name == "SIGKILL"
    assert exits[1].signal_name in ("SIGTERM", "SIGKILL")
    died_ns = [peek_metadata(path)["died_ns"] for path in sorted(tmp_path.glob("*.tkdump"))]
    assert died_ns[0] + 0.4e9 < died_ns[1] < time.time_ns()

    timeline = load(tmp_path)
    hang = find_hang(timeline)
    assert not hang.at_least
    waits = {wait.rank: wait.lasts_ns for wait in (hang.longest, *hang.others)}
    assert waits[0] >= 1e9
    assert waits[1] >= 1.4e9
    died, hung, *_ = headlines(analyze(timeline))
    by_launcher = "rank 1 was killed by the launcher in endless.wait_token"
    assert (died.word, died.text) == ("died", f"rank 0 was killed by SIGKILL in endless.wait_token; {by_launcher}")
    assert hung.word == "hang"
    assert re.match(r"rank [01] has waited \d", hung.text)
