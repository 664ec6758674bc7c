"""Whoever copies a segment, or saves it where its rank died, may come between any two lines of what writes it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.captures import EVENT_TABLE, CaptureSpec, metadata
from tracekern.dump import format as fmt
from tracekern.errors import BadInput
from tracekern.segment import writer as segment_module
from tracekern.segment.launch_plan import LaunchPlan
from tracekern.segment.names import has_owner
from tracekern.segment.view import SegmentView
from tracekern.segment.writer import SegmentWriter

RUN = f"moment-test-{os.getpid()}"
Seen = tuple[tuple[int, ...], ...]


def plan(flags: int = 0) -> LaunchPlan:
    return LaunchPlan("kernel", 2, 2, 4, blocks=range(2), events=json.dumps(EVENT_TABLE).encode(), flags=flags)


@pytest.fixture
def segment() -> Iterator[SegmentWriter]:
    segment = SegmentWriter.create(RUN, 0, metadata(CaptureSpec(), 0), 1 << 20)
    yield segment
    segment.unlink()
    segment.close()


def look_at_each_line(look: Callable[[], None], act: Callable[[], object]) -> None:
    def trace(frame, _event, _argument):
        if frame.f_code.co_filename != segment_module.__file__:
            return None
        look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    look()


def launches_seen(segment: SegmentWriter, act: Callable[[], object]) -> list[Seen]:
    """What there was to salvage, in the order in which it changed: (generation, order, sequence, epoch) of a launch."""
    outside = SegmentView.attach(segment.name)
    seen: list[Seen] = []

    def look() -> None:
        fields = ("generation", "order", "sequence", "epoch")
        found = tuple(tuple(int(entry[field]) for field in fields) for entry in outside.recorded_launches())
        if not seen or seen[-1] != found:
            seen.append(found)

    look_at_each_line(look, act)
    return seen


def test_a_region_is_of_one_launch_or_of_nobody(segment: SegmentWriter):
    (region,) = segment.reserve_regions(plan(), 1)
    one = 1 << fmt.GENERATION_SHIFT
    first, second, third = ((0, 0, 5, 50),), ((one, 1, 6, 60),), ((2 * one, 2, 7, 70),)
    assert launches_seen(segment, lambda: segment.start_launch(region, 5, 50)) == [(), first]
    assert launches_seen(segment, lambda: segment.start_launch(region, 6, 60)) == [first, second]
    assert launches_seen(segment, lambda: segment.start_launch(region, 7, 70)) == [second, third]


def test_a_region_that_a_replay_gives_up_is_nobodys_at_once(segment: SegmentWriter):
    (region,) = segment.reserve_regions(plan(fmt.ENTRY_IN_GRAPH), 1)
    segment.descriptor(region.offset)["replay"] = 4
    segment.host_words[0] = 9
    assert launches_seen(segment, lambda: segment.renew_region(region)) == [((0, 0, 3, 0),), ()]
    assert segment.launches()["order"].tolist() == [9], "behind all launches that have started"


@pytest.mark.parametrize("rows", ["launches", "clock_samples", "host_spans"])
def test_what_is_counted_is_complete(segment: SegmentWriter, rows: str):
    acts = {
        "launches": lambda: segment.reserve_regions(plan(), 3),
        "clock_samples": lambda: segment.append_clock_samples(np.full(3, 7, fmt.CLOCK_SAMPLE)),
        "host_spans": lambda: segment.append_host_span("name", 1, 2, 3),
    }
    outside, found = SegmentView.attach(segment.name), []
    acts[rows]()
    look_at_each_line(lambda: found.append(getattr(outside, rows)().tobytes()), acts[rows])
    assert len(set(found)) == 2
    assert all(found[-1].startswith(earlier) for earlier in found)
    for entry in outside.launches():
        assert outside.events(entry) == EVENT_TABLE
        assert outside.descriptor(int(entry["headers_offset"]) - 64)["records_per_track"] == 4


def test_a_segment_at_birth_is_none_yet_or_its_ranks():
    """What has no owner may be taken for a dead rank's, and removed."""
    name, looked, made = fmt.segment_name(RUN, 1), [], []

    def look() -> None:
        looker = os.fork()
        if looker:
            looked.append(os.waitstatus_to_exitcode(os.waitpid(looker, 0)[1]))
            return
        told = 2
        try:
            found = SegmentView.attach(name)
            is_whole = found.metadata["rank"] == 1 and found.header["state"] == fmt.SegmentState.OPEN
            told = 1 if is_whole and found.header["pid"] == os.getppid() and has_owner(name) else 3
        except BadInput:
            told = 0
        finally:
            os._exit(told)

    try:
        look_at_each_line(look, lambda: made.append(SegmentWriter.create(RUN, 1, metadata(CaptureSpec(), 1), 1 << 16)))
    finally:
        made[0].unlink()
    assert looked == sorted(looked)
    assert set(looked) == {0, 1}
