"""CUDA graphs: a thousand replays of a captured pipeline, each into regions of its own; a late host only loses."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.devices import one_rank, require_gpus
from tests.paths import TESTS
from tracekern.comm.ranks.resident import Residents
from tracekern.dump.format import RECORD_BYTES
from tracekern.dump.reader import Dump, read_dump
from tracekern.errors import BadInput
from tracekern.launcher.launch import launch_ranks
from tracekern.record.session import capture

PROGRAM = str(TESTS / "graph_replays.py")
STAGES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


def replay(directory: Path, ranks: int, *arguments: object) -> list[dict]:
    """Runs graph_replays.py; its reports by rank."""
    require_gpus(ranks)
    lines: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    command = [sys.executable, PROGRAM, str(directory), *map(str, arguments)]
    exits = launch_ranks(ranks, command, on_line=lambda rank, line: lines[rank].append(line), timeout_s=100)
    assert [end.returncode for end in exits] == [0] * ranks, lines
    return [json.loads(next(line for line in lines[rank] if line.startswith("{"))) for rank in range(ranks)]


def epochs_of(dump: Dump, name: str) -> dict[int, set[int]]:
    """Replay number -> the epochs that the tracks of kernel `name` recorded."""
    found = {}
    for launch in dump.launches:
        if launch.name == f"decode/{name}":
            headers = dump.track_headers(launch)
            assert (headers["started"] != 0).all()
            assert (headers["finished"] != 0).all()
            assert (headers["written"] == headers["attempted"]).all()
            found[launch.sequence] = set(headers["epoch"].tolist())
    return found


def check_replays(dump: Dump, report: dict) -> None:
    """Every traced replay is there once, with its number, its epoch and all its records."""
    assert report["wrong"] == 0
    assert (report["lost_replays"], report["lost_records"]) == (0, 0)
    calls = [call for call, traced in enumerate(report["traced"]) if traced]
    for stage in STAGES:
        epochs = epochs_of(dump, stage)
        assert sorted(epochs) == list(range(len(calls)))
        first = next(iter(epochs[0]))
        for number, call in enumerate(calls):
            assert epochs[number] == {(first + call - calls[0]) & 0xFFFFFFFF}
    records: dict[int, int] = {}
    for launch in dump.launches:
        if launch.name.startswith("decode/"):
            records[launch.sequence] = records.get(launch.sequence, 0) + launch.records_count
    counted = report["counted"]
    assert [records[number] for number in range(len(calls))] == [counted[call % len(counted)] for call in calls]


@pytest.mark.gpu
@pytest.mark.parametrize("sink", ["host", "device"])
def test_a_thousand_replays_record_into_regions_of_their_own(tmp_path, sink):
    (report,) = replay(tmp_path, 1, 1334, sink)
    assert sum(report["traced"]) >= 1000
    check_replays(read_dump(tmp_path / "rank_00000.tkdump"), report)


@pytest.mark.multigpu
def test_replays_of_two_ranks(tmp_path):
    for rank, report in enumerate(replay(tmp_path, 2, 200, "auto")):
        check_replays(read_dump(tmp_path / f"rank_{rank:05d}.tkdump"), report)


@pytest.mark.gpu
def test_a_graph_of_a_capture_that_is_off_replays_untraced(tmp_path):
    require_gpus(1)
    (tmp_path / "file").write_text("")
    total = torch.zeros(1, device="cuda")

    def run() -> None:
        assert not session.launch("add", grid=1, warps=1, events={"name": "none", "events": []}).traced
        total.add_(1)

    with capture(tmp_path / "file", device="cuda", on_error="warn") as session:
        run()
        graph = session.graph(run)
        graph.replay()
        graph.replay(traced=False)
    graph.replay()
    assert (total.item(), graph.lost_replays, graph.lost_records) == (4, 0, 0)


@pytest.mark.gpu
def test_an_error_of_the_functions_own_leaves_the_capture_on(tmp_path, caplog):
    require_gpus(1)

    def fail() -> None:
        raise ArithmeticError

    pipeline, tensors = one_rank()
    with capture(tmp_path, device=pipeline.comm.device, on_error="warn") as session:
        with pytest.raises(ArithmeticError):
            session.graph(fail)
        pipeline(*tensors, capture=session)
    assert caplog.messages == []
    assert read_dump(tmp_path / "rank_00000.tkdump").launches


@pytest.mark.gpu
def test_resident_ranks_capture_no_graph(tmp_path):
    require_gpus(1)
    with Residents(1).as_rank(0):
        pipeline, tensors = one_rank()
        with capture(tmp_path, device=pipeline.comm.device) as session:
            with pytest.raises(BadInput, match=r"capture.graph\('decode'\): resident ranks replay no graphs"):
                session.graph(lambda: pipeline(*tensors, capture=session), name="decode")
            pipeline(*tensors, capture=session)
            pipeline.synchronize()
    assert {launch.name for launch in read_dump(tmp_path / "rank_00000.tkdump").launches} == set(STAGES)


@pytest.mark.gpu
def test_a_replay_is_read_while_the_next_one_runs(tmp_path):
    (report,) = replay(tmp_path, 1, 20, "host", "reading")
    dump = read_dump(tmp_path / "rank_00000.tkdump")
    kept: dict[int, dict[str, str]] = {}
    for launch in dump.launches:
        if launch.name.startswith("decode/"):
            stop = launch.records_offset + launch.records_count * RECORD_BYTES
            records = dump.payload[launch.records_offset : stop]
            assert len(records)
            kept.setdefault(launch.sequence, {})[launch.name] = hashlib.sha256(records.tobytes()).hexdigest()
    assert all(set(launches) == {f"decode/{stage}" for stage in STAGES} for launches in kept.values())
    assert [found["launches"] for found in report["was_read"]] == [kept[number] for number in range(19)]
    assert all(found["next_was_running"] for found in report["was_read"])


@pytest.mark.gpu
def test_a_late_host_loses_counted_records_and_stops_nobody(tmp_path):
    (report,) = replay(tmp_path, 1, 20, "host", "late")
    assert report["enqueued_s"] < 0.15  # the GPU slept longer than that
    dump = read_dump(tmp_path / "rank_00000.tkdump")
    assert sorted(epochs_of(dump, "combine_recv")) == [0, 1, 2, 3]  # there were four slots
    assert report["lost_replays"] == 16
    assert report["lost_records"] == 16 * report["counted"][-1]
    assert dump.metadata["launches_refused"] == 16 * len(STAGES)
    assert dump.metadata["refused_text"].endswith(
        "max_bytes was not used up: /dev/shm was full (make a container's larger: docker run --shm-size=1g), or "
        "a graph had too few slots"
    )


@pytest.mark.gpu
def test_the_size_that_is_named_is_enough_for_all_replays(tmp_path, caplog):
    require_gpus(1)
    pipeline, tensors = one_rank()
    out = torch.empty_like(tensors[0])

    def lost(max_bytes: int) -> int:
        options = {"device": pipeline.comm.device, "max_bytes": max_bytes, "records_per_track": 256}
        with capture(tmp_path, **options) as session:
            pipeline(*tensors, out=out, capture=session)
            pipeline.synchronize()
            graph = session.graph(lambda: pipeline(*tensors, out=out, capture=session), name="decode")
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()
        assert graph.lost_records == 0, "they ran untraced"
        return graph.lost_replays

    few = lost(32 << 20)  # a call has 4 kernels of 256 tracks with 4 KiB each
    assert 10 < few < 20
    assert f"{few} of 20 traced replays ran unrecorded" in caplog.text
    assert f"; max_bytes was used up for {few}" in caplog.text
    said = read_dump(tmp_path / "rank_00000.tkdump").metadata["refused_text"]
    found = re.fullmatch(rf"{4 * few} launches ran unrecorded; max_bytes=(\d+) would have been enough", said)
    assert found, said
    assert lost(int(found[1])) == 0


@pytest.mark.gpu
def test_a_flight_recorder_without_room_for_a_graph_says_so_at_once_and_costs_nothing(tmp_path, caplog):
    require_gpus(1)
    pipeline, tensors = one_rank()
    out = torch.empty_like(tensors[0])
    with capture(tmp_path, device=pipeline.comm.device, keep="last", max_bytes=1 << 20) as session:
        graph = session.graph(lambda: pipeline(*tensors, out=out, capture=session), name="decode")
        assert re.search(
            r"graph decode: its replays take \d{7} bytes at least, and only \d{6,7} of max_bytes are left", caplog.text
        )
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert graph._ring.replays == 0, "of the traced instance"
    assert graph.lost_replays == 20
    assert "20 of 20 traced replays ran unrecorded; max_bytes was used up for 20" in caplog.text
    assert "a flight recorder uses its regions again, and max_bytes=1048576 has room for too few" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("sink", ["host", "device"])
def test_a_flight_recorder_keeps_the_last_replays(tmp_path, sink):
    require_gpus(1)
    pipeline, tensors = one_rank()
    out, num_replays = torch.empty_like(tensors[0]), 400
    options = {"device": pipeline.comm.device, "keep": "last", "sink": sink, "records_per_track": 64}
    with capture(tmp_path, max_bytes=64 << 20, **options) as session:
        pipeline(*tensors, out=out, capture=session)
        pipeline.synchronize()
        graph = session.graph(lambda: pipeline(*tensors, out=out, capture=session), name="decode")
        for number in range(num_replays):
            graph.replay()
            if number % 2:
                torch.cuda.synchronize()
    assert graph.lost_replays == 0
    dump = read_dump(tmp_path / "rank_00000.tkdump")
    for stage in STAGES:
        epochs = {}
        for launch in dump.launches:
            if launch.name == f"decode/{stage}":
                headers = dump.track_headers(launch)
                assert (headers["finished"] != 0).all(), "of each replay all tracks are there"
                epochs[launch.sequence] = set(headers["epoch"].tolist())
        last = sorted(epochs)
        assert last == list(range(last[0], num_replays)), "without a gap"
        assert 4 < len(last) < num_replays // 4, "regions were used again, many times"
        assert all(len(found) == 1 for found in epochs.values()), "none has a track of another replay"
        assert len(set.union(*epochs.values())) == len(last)


@pytest.mark.multigpu
def test_a_graph_is_counted_on_its_own_gpu(tmp_path):
    """Whichever is current when the capture closes: on another one its memory cannot be read."""
    require_gpus(2)
    pipeline, tensors = one_rank()
    out = torch.empty_like(tensors[0])
    with contextlib.ExitStack() as current, capture(tmp_path, device=pipeline.comm.device) as session:
        pipeline(*tensors, out=out, capture=session)
        pipeline.synchronize()
        graph = session.graph(lambda: pipeline(*tensors, out=out, capture=session), name="decode")
        for _ in range(3):
            graph.replay()
        current.enter_context(torch.cuda.device(1))
    assert graph.lost_replays == 0
    dump = read_dump(tmp_path / "rank_00000.tkdump")
    assert {len(epochs_of(dump, stage)) for stage in STAGES} == {3}
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)


@pytest.mark.gpu
def test_a_graph_that_cannot_be_recorded_whole_is_refused(tmp_path):
    """Too many launches, or names that no dump holds; the capture and its next graph are none the worse for it."""
    require_gpus(1)
    pipeline, tensors = one_rank()
    out = torch.empty_like(tensors[0])
    with capture(tmp_path, device=pipeline.comm.device) as session:

        def run(calls: int) -> None:
            for _ in range(calls):
                pipeline(*tensors, out=out, capture=session)
            assert pipeline.comm.device.error() == ""

        run(1)
        pipeline.synchronize()
        with pytest.raises(BadInput, match=r"capture.graph\('long'\): more than 64 traced launches"):
            session.graph(lambda: run(17), name="long")
        with pytest.raises(BadInput, match=r"launch 'x{90}/dispatch_send': wanted a name of at most 95 bytes"):
            session.graph(lambda: run(1), name="x" * 90)
        session.graph(lambda: run(16), name="whole").replay()
        pipeline.synchronize()
    launches = [launch.name for launch in read_dump(tmp_path / "rank_00000.tkdump").launches]
    assert sorted(set(launches)) == sorted([*STAGES, *(f"whole/{stage}" for stage in STAGES)])
    assert len(launches) == 4 + 64


@pytest.mark.gpu
def test_garbage_of_an_earlier_graph_stays_while_one_is_captured(tmp_path):
    """It holds device memory, and to give that back spoils what is being captured."""
    require_gpus(1)
    pipeline, tensors = one_rank()
    out = torch.empty_like(tensors[0])
    with capture(tmp_path, device=pipeline.comm.device) as session:

        def run() -> None:
            pipeline(*tensors, out=out, capture=session)
            if gc.isenabled():
                gc.collect()  # it may come at any time

        run()
        pipeline.synchronize()
        earlier = torch.cuda.CUDAGraph()
        with torch.cuda.graph(earlier):
            out.zero_()
        garbage = [earlier]
        garbage.append(garbage)
        del earlier, garbage
        graph = session.graph(run, name="decode")
        assert gc.isenabled()
        graph.replay()
        pipeline.synchronize()
    assert graph.lost_replays == 0
