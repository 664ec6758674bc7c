"""Launches and ranges that one call of the compiled part writes: beside each other, the long way, and in forks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tracekern
from tracekern import _core
from tracekern.dump.reader import read_dump
from tracekern.record import clock_samples

EVENTS = _core.barrier_event_table()
THREADS, CALLS = 8, 1500


def launch(capture: tracekern.Capture, name: str, **more: Any) -> bool:
    return capture.launch(name, grid=1, warps=2, events=EVENTS, **more).traced


def call_often(capture: tracekern.Capture, number: int) -> None:
    for call in range(CALLS):
        assert launch(capture, "shared", epoch=call)
        assert launch(capture, f"own {number}", epoch=call, key=f"call {call}" if call % 2 else "")
        with capture.range(f"range {number}"):
            pass
        if call % 100 == 0:  # the long way, between those of others
            assert launch(capture, f"new {number} {call}")


def test_threads_lose_nothing_and_write_nothing_twice(tmp_path: Path):
    room = {"max_bytes": 1 << 28, "host_spans": THREADS * CALLS, "records_per_track": 4}
    with tracekern.capture(tmp_path, device="cpu", **room) as capture:
        threads = [threading.Thread(target=call_often, args=(capture, number)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        entries = capture.segment.launches()
        offsets = np.sort(entries["headers_offset"])
        assert np.diff(offsets).min() >= 64  # regions of their own
    dump = read_dump(tmp_path / "rank_00000.tkdump")
    numbers: dict[str, list[int]] = {}
    for entry in dump.launches:
        numbers.setdefault(entry.name, []).append(entry.sequence)
    wanted = {"shared": THREADS * CALLS, **{f"own {number}": CALLS for number in range(THREADS)}}
    assert {name: sorted(numbers[name]) == [*range(count)] for name, count in wanted.items()} == dict.fromkeys(
        wanted, True
    )
    assert len(dump.launches) == sum(wanted.values()) + THREADS * CALLS // 100
    own = [entry for entry in dump.launches if entry.name.startswith("own")]
    assert all(entry.key == (f"call {entry.epoch}" if entry.epoch % 2 else "") for entry in own)
    assert all(entry.sequence == entry.epoch for entry in own)
    spans = dump.host_spans()
    names, counts = np.unique(spans["name"], return_counts=True)
    assert dict(zip(names.tolist(), counts.tolist(), strict=True)) == {
        f"range {number}".encode(): CALLS for number in range(THREADS)
    }
    assert np.all(spans["end_ns"] >= spans["start_ns"])


def test_a_call_waits_for_nobody_who_is_in_the_long_way(tmp_path: Path):
    with tracekern.capture(tmp_path, device="cpu") as capture:
        assert launch(capture, "known")
        with capture.segment.lock:
            assert capture._short_way("known", 1, 2, 0, EVENTS, (), 0, "", False) == -1
            assert not capture.segment.host.add_span("range", 1)
        assert capture._short_way("known", 1, 2, 0, EVENTS, (), 0, "", False) > 0
    assert len(read_dump(tmp_path / "rank_00000.tkdump").launches) == 2  # what was turned away is not counted


def test_a_fork_writes_nothing(tmp_path: Path):
    with tracekern.capture(tmp_path, device="cpu") as capture:
        assert launch(capture, "kernel")
        child = os.fork()
        if child == 0:
            is_traced = launch(capture, "kernel")
            with capture.range("of the fork"):
                pass
            os._exit(int(is_traced))
        assert os.waitpid(child, 0)[1] == 0
        assert launch(capture, "kernel")
        with capture.range("of the rank"):
            pass
    dump = read_dump(tmp_path / "rank_00000.tkdump")
    assert [entry.sequence for entry in dump.launches] == [0, 1]
    assert dump.host_spans()["name"].tolist() == [b"of the rank"]


def test_what_turns_a_capture_off_ends_the_short_way(tmp_path: Path, caplog):
    with tracekern.capture(tmp_path, device="cpu", on_error="warn") as capture:
        assert launch(capture, "kernel")
        with capture.range(5):
            pass
        assert not launch(capture, "kernel")
    assert "range(5): wanted a name; nothing more is recorded" in caplog.text


def test_a_span_that_is_entered_again_begins_again_or_is_not_recorded(tmp_path: Path):
    with tracekern.capture(tmp_path, device="cpu", on_error="warn") as capture:
        span = capture.range("again")
        for _ in range(2):
            with span:
                pass
        with capture.range(5):  # turns the capture off
            pass
        with span:
            pass
    first, second = read_dump(tmp_path / "rank_00000.tkdump").host_spans()
    assert first["end_ns"] <= second["start_ns"]


def test_every_third_launch_and_counted_ones(tmp_path: Path):
    with tracekern.capture(tmp_path, device="cpu", every=3) as capture:
        with capture.counting(repeats=4):
            launch(capture, "kernel")
        assert [launch(capture, "kernel") for _ in range(9)] == [True, False, False] * 3
    assert [entry.sequence for entry in read_dump(tmp_path / "rank_00000.tkdump").launches] == [0, 3, 6]


def test_a_flight_recorder_keeps_the_last_ranges(tmp_path: Path):
    with tracekern.capture(tmp_path, device="cpu", keep="last", host_spans=10) as capture:
        for number in range(25):
            with capture.range(f"{number} of many, \N{GREEK SMALL LETTER MU}s" * 9):
                pass
    spans = read_dump(tmp_path / "rank_00000.tkdump").host_spans()
    numbers = sorted(int(name.decode().partition(" ")[0]) for name in spans["name"].tolist())
    assert numbers == [*range(15, 25)]
    assert {len(name) for name in spans["name"].tolist()} <= {94, 95}


def launch_slowly(world: Any, directory: str) -> bool:
    with mock.patch.object(clock_samples, "SAMPLE_EVERY_S", 0.05), tracekern.capture(directory) as capture:
        for _ in range(500):
            time.sleep(0.002)
            launch(capture, "kernel")
        return capture._short_way is not None


def test_clocks_are_sampled_before_the_same_launches(pools, tmp_path: Path):
    assert pools(2).call(launch_slowly, str(tmp_path)) == [True, True]
    rounds = [set(read_dump(path).clock_samples()["round_idx"]) for path in sorted(tmp_path.glob("*.tkdump"))]
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) > 3  # more than when it opens and closes


@pytest.mark.parametrize("wrong", [{"epoch": -1}, {"epoch": 1 << 32}, {"epoch": "1"}, {"key": 7}, {"key": "\ud800"}])
def test_wrong_arguments_of_a_known_kernel_are_refused(tmp_path: Path, wrong: dict[str, Any]):
    with tracekern.capture(tmp_path, device="cpu") as capture:
        assert launch(capture, "kernel")
        with pytest.raises(tracekern.BadInput, match="launch 'kernel': "):
            launch(capture, "kernel", **wrong)
        assert launch(capture, "kernel", key="k" * 200)
    told = [(entry.sequence, entry.key) for entry in read_dump(tmp_path / "rank_00000.tkdump").launches]
    assert told == [(0, ""), (1, "k" * 95)]
