"""The flight recorder: rings and their laps, torn or not; time limits, traps and resets; what a dead rank leaves."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekern.errors import BadInput
from tracekern.moe.pipeline import P2PPipeline
from tracekern.moe.routing import draw_batch, draw_expert_scale
from tracekern.moe.run import MoeRun, run
from tracekern.moe.shape import MoeShape
from tracekern.record import format as fmt
from tracekern.record.group import Group
from tracekern.record.ring import read_rings
from tracekern.record.session import capture
from tracekern.timeline.merge import load
from tracekern.timeline.model import OPEN_END, EventClass, Timeline

START = 5 << fmt.LAP_SHIFT | (1 << fmt.LAP_SHIFT) - 50  # the low 48 bits wrap after 50 ticks
SHAPE = MoeShape(num_ranks=1, max_tokens=24, num_experts=4, topk=2, hidden=16, dtype="fp32")


def write_ring(ring: np.ndarray, start: int, first_lap: int, count: int, dropped: frozenset[int] = frozenset()) -> None:
    """What a launch leaves in a ring: record n is a mark of payload n at start + n; those dropped never arrive."""
    for number in set(range(count)) - dropped:
        lap, slot = divmod(number + first_lap * len(ring), len(ring))
        ticks = lap % (1 << 16) << fmt.LAP_SHIFT | (start + number) % (1 << fmt.LAP_SHIFT)
        ring[slot] = (ticks, 0, fmt.RecordKind.MARK | number << fmt.PAYLOAD_SHIFT)


def header(start: int, **changes: int) -> np.ndarray:
    headers = np.zeros(1, fmt.TRACK_HEADER)
    headers["start_ticks"] = start
    for key, value in changes.items():
        headers[key] = value
    return headers


@given(
    bits=st.integers(0, 4),
    first_lap=st.sampled_from([0, 1, 7, (1 << 16) - 2, (1 << 16) - 1, 1 << 16, 3 << 16]),
    count=st.integers(0, 80),
    before=st.integers(0, 40),
    lost_at_the_end=st.sets(st.integers(0, 5)),
)
def test_a_torn_ring_gives_the_records_that_arrived(bits, first_lap, count, before, lost_at_the_end):
    num_slots = 1 << bits
    ring = np.zeros(num_slots, fmt.WIDE_RECORD)
    write_ring(ring, START - 1000, max(first_lap - 40, 0), min(before, 40 * num_slots))  # an earlier launch
    dropped = frozenset(count - 1 - back for back in lost_at_the_end)
    write_ring(ring, START, first_lap, count, dropped)
    rings = read_rings(ring[None], header(START), first_lap)
    arrived = sorted(set(range(count)) - dropped)
    newest = arrived[-1] if arrived else -1
    window = range(max(newest - num_slots + 1, 0), newest + 1)
    wanted = [number for number in window if number not in dropped]
    kept = rings.kept[0]
    assert (ring["word"][rings.order[0][kept]] >> fmt.PAYLOAD_SHIFT).tolist() == wanted
    assert rings.ticks[0][kept].tolist() == [START + number for number in wanted]
    assert int(rings.attempted[0]) == newest + 1
    assert int(rings.torn[0]) == len(window) - len(wanted)


def test_a_finished_ring_tells_its_count_beyond_any_number_of_laps():
    ring = np.zeros(4, fmt.WIDE_RECORD)
    write_ring(ring, START, 9, 6)
    told = header(START, finished=1, attempted=(9 * 4 + (4 << 16) + 6) & 0xFFFFFFFF)
    rings = read_rings(ring[None], told, 9)
    assert int(rings.attempted[0]) == (4 << 16) + 6


def record_pipeline(directory: Path, **options: object) -> Timeline:
    """One rank's pipeline, three calls of the same shape."""
    pipeline = P2PPipeline(Group(0, 1), SHAPE, "balanced", num_blocks=2, warps_per_block=2)
    batch = draw_batch(SHAPE, seed=3, rank=0, iteration=0, routing="uniform", uneven=False)
    with capture(directory, device=pipeline.comm.device, **options) as session:
        for _ in range(3):
            pipeline(batch.x, batch.topk_idx, batch.topk_weights, draw_expert_scale(SHAPE), capture=session)
    return load(directory)


def told_by_track(timeline: Timeline) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """(launch, track) -> (event, payload at its end) of its closed spans, in the order in which they ended."""
    spans, found = timeline.spans, defaultdict(list)
    for row in np.lexsort((-spans.start, spans.end)):
        if spans.end[row] != OPEN_END and timeline.tracks[spans.track[row]].block >= 0:
            event = timeline.events[spans.event[row]].name
            key = (timeline.launches[spans.launch[row]].launch_idx, int(spans.track[row]))
            found[key].append((event, int(spans.end_payload[row])))
    return found


def test_the_last_records_stay(tmp_path):
    whole = record_pipeline(tmp_path / "first", records_per_track=1 << 12)
    tail = record_pipeline(tmp_path / "last", records_per_track=10, keep="last")
    assert all(launch.records_per_track == 16 for launch in tail.launches)
    assert {problem.kind for problem in tail.problems} <= {"overwritten_records", "unmatched_wait"}
    assert all(problem.severity == "note" for problem in tail.problems)
    everything, kept = told_by_track(whole), told_by_track(tail)
    assert kept.keys() == everything.keys()
    for key, told in kept.items():
        assert sorted(told) == sorted(everything[key][-len(told) :]), key
    needed = {launch.launch_idx: launch.records_needed for launch in whole.launches}
    overwritten = {launch.launch_idx: launch.records_overwritten for launch in tail.launches}
    assert any(overwritten.values())
    assert all((needed[idx] > 16) == (count > 0) for idx, count in overwritten.items())
    assert not any(launch.records_lost for launch in tail.launches)


def test_a_span_whose_begin_was_overwritten_starts_at_the_oldest_record(tmp_path):
    tail = record_pipeline(tmp_path, records_per_track=4, keep="last")
    spans = tail.spans
    headless = [idx for idx, event in enumerate(tail.events) if not event.begin_fields and not event.channel]
    by_name = defaultdict(int)
    for row in range(len(spans)):
        track_rows = spans.track == spans.track[row]
        same = track_rows & (spans.launch == spans.launch[row])
        if int(spans.event[row]) in headless and tail.tracks[spans.track[row]].block >= 0:
            assert spans.start[row] == spans.start[same].min()
            by_name[tail.events[spans.event[row]].name] += 1
    assert by_name
    assert not [problem for problem in tail.problems if problem.kind == "orphan_end"]


def test_what_cannot_be_a_ring_is_refused(tmp_path):
    for options, words in (
        ({"keep": "last", "record_format": "compact"}, "keep='last' with record_format='compact': wanted 'wide'"),
        ({"keep": "newest"}, "keep='newest': wanted 'first', or 'last'"),
    ):
        with pytest.raises(BadInput, match=words):
            capture(tmp_path, **options)


SMALL = {"ranks": 4, "tokens": 12, "hidden": 64, "experts": 16, "topk": 3, "blocks": 3, "warps": 2}


def open_waits(timeline: Timeline) -> set[int]:
    """Ranks that stood in a wait."""
    spans, ranks = timeline.spans, timeline.track_ranks()
    is_wait = np.array([event.event_class is EventClass.WAIT for event in timeline.events])
    return set(ranks[spans.track[(spans.end == OPEN_END) & is_wait[spans.event]]].tolist())


def test_the_last_records_of_a_killed_rank_are_kept(tmp_path):
    options = MoeRun(**SMALL, iterations=100_000, records_per_track=16, keep="last", timeout_ms=1000)
    pids: dict[int, int] = {}

    def kill_in_mid_run(done: int, _total: int) -> None:
        if done == 20:
            os.kill(pids[2], signal.SIGKILL)

    report = run(options, tmp_path, kill_in_mid_run, on_start=pids.__setitem__)
    assert "rank 2 killed by signal 9" in report.errors
    timeline = load(tmp_path)
    assert [rank.state for rank in timeline.ranks] == ["closed", "closed", "salvaged", "closed"]
    assert {0, 1, 3} <= open_waits(timeline)
    of_rank_2 = [launch for launch in timeline.launches if launch.rank == 2]
    assert sum(launch.records_overwritten for launch in of_rank_2) > 0
    assert {p.kind for p in timeline.problems} <= {"overwritten_records", "unmatched_wait", "open_span", "salvaged"}
