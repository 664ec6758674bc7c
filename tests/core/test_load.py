"""Captures of known content through the whole reading side: read, decode, align, join."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.captures import EPOCH, GROUP_NS, SIGNAL_OFFSETS, START_NS, WAIT_OFFSETS, CaptureSpec, write_capture
from tracekern.analysis.questions.summary import summarize
from tracekern.dump.reader import Dump, read_dump
from tracekern.errors import BadInput
from tracekern.timeline.load import load
from tracekern.timeline.model import EventClass, Timeline, TrackKind, unpack_field


def device_rows(timeline: Timeline, name: str) -> np.ndarray:
    idx = [idx for idx, event in enumerate(timeline.events) if event.name == name]
    assert len(idx) == 1
    return np.flatnonzero(timeline.spans.event == idx[0])


def test_ranks_land_on_one_axis(tmp_path: Path):
    spec = CaptureSpec(num_ranks=3, launches=2, host_spans=2)
    timeline = load(write_capture(tmp_path, spec))

    assert timeline.aligned
    assert timeline.problems == ()
    assert timeline.origin_ns == START_NS
    waits = device_rows(timeline, "wait_token")
    assert len(waits) == 3 * spec.flows_per_rank
    group_start = np.arange(spec.groups * spec.launches) * GROUP_NS
    wanted = np.tile(group_start, 3 * spec.num_tracks)
    # The clocks of the ranks are 100 us apart; the ping-pong proves 404 ns and is exact here.
    assert np.abs(timeline.spans.start[waits] - wanted - WAIT_OFFSETS[0]).max() <= 1
    assert np.abs(timeline.spans.end[waits] - wanted - WAIT_OFFSETS[1]).max() <= 1


def test_ranks_of_one_clock_land_on_one_axis_without_samples_of_their_own(tmp_path: Path):
    spec = CaptureSpec(num_ranks=4, clocks=(0, 1, 0, 1), path_ns=3000)
    timeline = load(write_capture(tmp_path, spec))
    assert [rank.clock_id for rank in timeline.ranks] == ["clock 0", "clock 1"] * 2
    clocks = [rank.clock for rank in timeline.ranks]
    assert (clocks[0], clocks[1]) == (clocks[2], clocks[3])
    assert [clock.method for clock in clocks] == ["reference", "ping-pong"] * 2
    assert clocks[3].round_trip_ns is not None, "flows between the clocks tightened both"
    assert timeline.problems == ()
    assert len(timeline.flows) == 4 * spec.flows_per_rank
    took = timeline.spans.end[timeline.flows.wait] - timeline.spans.start[timeline.flows.signal]
    assert np.abs(took - (WAIT_OFFSETS[1] - SIGNAL_OFFSETS[0])).max() <= 1
    unaligned = load(tmp_path, unaligned=True)
    assert unaligned.ranks[0].clock.anchor_ns == unaligned.ranks[2].clock.anchor_ns


def test_dumps_that_name_no_clock_are_related_by_samples_alone(tmp_path: Path):
    capture = write_capture(tmp_path / "old", CaptureSpec(num_ranks=2))
    assert "id" not in read_dump(capture / "rank_00000.tkdump").metadata["clock"]
    assert [rank.clock_id for rank in load(capture).ranks] == ["", ""]
    with pytest.raises(BadInput, match="no clock samples relate it to rank 0"):
        load(write_capture(tmp_path / "wild", CaptureSpec(num_ranks=2, clock_samples=False)))


def test_spans_are_sorted_and_index_what_exists(tmp_path: Path):
    timeline = load(write_capture(tmp_path, CaptureSpec(num_ranks=2, launches=3, host_spans=5)))
    spans = timeline.spans
    order = np.lexsort((spans.start, spans.track))
    assert (order == np.arange(len(spans))).all()
    assert spans.track.max() == len(timeline.tracks) - 1
    assert spans.launch.max() == len(timeline.launches) - 1
    kinds = np.array([track.kind for track in timeline.tracks])[spans.track]
    classes = np.array([event.event_class for event in timeline.events])[spans.event]
    assert ((kinds == TrackKind.HOST) == (classes == EventClass.HOST)).all()
    assert ((kinds == TrackKind.LAUNCH) == (classes == EventClass.LAUNCH)).all()
    assert (kinds == TrackKind.LAUNCH).sum() == 2 * 3
    host = np.flatnonzero(kinds == TrackKind.HOST)
    assert [timeline.host_names[idx] for idx in spans.begin_payload[host].tolist()] == [
        f"step {i}" for i in range(5)
    ] * 2


def test_every_wait_has_the_one_signal_of_its_slot(tmp_path: Path):
    spec = CaptureSpec(num_ranks=3, launches=2)
    timeline = load(write_capture(tmp_path, spec))
    spans, flows = timeline.spans, timeline.flows
    assert len(flows) == 3 * spec.flows_per_rank
    assert len(np.unique(flows.wait)) == len(flows)
    ranks = timeline.track_ranks()[spans.track]
    assert (ranks[flows.wait] == (ranks[flows.signal] + 1) % 3).all()
    fields = timeline.events[spans.event[flows.signal[0]]].begin_fields
    for field, payload_of in (("slot", spans.begin_payload),):
        signalled = unpack_field(fields, field, payload_of[flows.signal])
        assert (signalled == unpack_field(fields, field, payload_of[flows.wait])).all()
    epochs = np.array([launch.epoch for launch in timeline.launches])[spans.launch]
    assert (epochs[flows.signal] == epochs[flows.wait]).all()
    assert set(epochs.tolist()) == {EPOCH, EPOCH + 1}


def test_without_clock_samples_alignment_is_refused(tmp_path: Path):
    write_capture(tmp_path, CaptureSpec(num_ranks=2, clock_samples=False))
    with pytest.raises(BadInput, match=r"rank 1.*name the dumps of the other ranks and --partial.*--unaligned"):
        load(tmp_path)
    assert load(tmp_path / "rank_00000.tkdump", partial=True).aligned
    timeline = load(tmp_path, unaligned=True)
    assert not timeline.aligned
    assert timeline.title.startswith("UNALIGNED")


def test_unaligned_ranks_stand_beside_their_own_hosts(tmp_path: Path):
    years = 10**17
    write_capture(tmp_path, CaptureSpec(num_ranks=2, host_spans=3, clock_offset_ns=years))
    distances, durations = [], []
    for unaligned in (False, True):
        timeline = load(tmp_path, unaligned=unaligned)
        ranks = timeline.track_ranks()[timeline.spans.track]
        is_host = np.array([track.kind is TrackKind.HOST for track in timeline.tracks])[timeline.spans.track]
        start = timeline.spans.start
        distances.append(
            [int(start[is_host & (ranks == rank)].min() - start[~is_host & (ranks == rank)].min()) for rank in range(2)]
        )
        durations.append(summarize(timeline).duration_ns)
        bounds = [rank.clock.host_hard_ns for rank in timeline.ranks]
    assert distances[1] == pytest.approx(distances[0], abs=max(bounds))
    assert durations[1] <= durations[0] < years


def test_losses_are_told_and_strict_refuses_them(tmp_path: Path):
    spec = CaptureSpec(records_per_track=30)
    write_capture(tmp_path, spec)
    timeline = load(tmp_path)
    per_track = [p for p in timeline.problems if p.kind == "lost_records" and p.track >= 0]
    per_launch = [p for p in timeline.problems if p.kind == "lost_records" and p.track < 0]
    assert len(per_track) == 2 * spec.num_tracks
    assert {p.count for p in per_track} == {20}
    assert sum(p.count for p in per_launch) == sum(p.count for p in per_track)
    assert {launch.records_needed for launch in timeline.launches} == {50}
    with pytest.raises(BadInput, match="50 would have been enough"):
        load(tmp_path, strict=True)


@pytest.mark.parametrize("key", ["launches_lost", "launches_refused", "host_spans_lost", "clock_samples_lost"])
def test_strict_refuses_whatever_a_capture_counts_as_lost(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch):
    def read_lossy(path: Path) -> Dump:
        dump = read_dump(path)
        dump.metadata[key] = 3
        return dump

    write_capture(tmp_path, CaptureSpec())
    load(tmp_path, strict=True)
    monkeypatch.setattr("tracekern.timeline.load.read_dump", read_lossy)
    with pytest.raises(BadInput, match=r"rank 0: 3 .*record again, or merge without --strict"):
        load(tmp_path, strict=True)


def test_a_killed_rank_shows_its_open_waits(tmp_path: Path):
    spec = CaptureSpec(num_ranks=3, launches=2, killed_rank=1)
    timeline = load(write_capture(tmp_path, spec))
    assert [rank.state for rank in timeline.ranks] == ["closed", "salvaged", "closed"]
    opened = [p for p in timeline.problems if p.kind == "open_span" and p.track >= 0]
    assert {p.rank for p in opened} == {1}
    assert any("stream 0" in p.text for p in opened)
    assert sum("wait_token" in p.text for p in opened) == spec.num_tracks
    (held,) = [p for p in timeline.problems if p.kind == "open_work"]
    assert (held.rank, held.count) == (1, spec.num_tracks)
    assert held.text == "rank 1: 4 spans of work had begun and not ended in 4 tracks that never finished"


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([CaptureSpec(run_id="a"), CaptureSpec(run_id="b")], "merge one run at a time"),
        ([CaptureSpec(), CaptureSpec()], "rank 0 is also in"),
    ],
)
def test_captures_that_do_not_belong_together(tmp_path: Path, specs: list[CaptureSpec], message: str):
    paths = [write_capture(tmp_path / str(idx), spec) for idx, spec in enumerate(specs)]
    with pytest.raises(BadInput, match=message):
        load(paths)


def test_a_missing_rank_is_refused_unless_allowed(tmp_path: Path):
    write_capture(tmp_path, CaptureSpec(num_ranks=3))
    (tmp_path / "rank_00001.tkdump").unlink()
    with pytest.raises(BadInput, match="1 of 3 ranks have no dump: 1"):
        load(tmp_path)
    timeline = load(tmp_path, partial=True)
    assert [rank.rank for rank in timeline.ranks] == [0, 2]
    assert timeline.problems[0].kind == "missing_rank"


def test_ranks_may_lie_in_the_directories_of_several_nodes(tmp_path: Path):
    write_capture(tmp_path / "a", CaptureSpec(num_ranks=2))
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "rank_00001.tkdump").rename(tmp_path / "b" / "rank_00001.tkdump")
    assert len(load([tmp_path / "a", tmp_path / "b"]).ranks) == 2
