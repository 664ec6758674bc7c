"""How ranks agree on when to sample their clocks: with words in each other's segments, and never a wait in vain."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from tests.captures import CaptureSpec, metadata
from tracekern.record.agree import SampleAgreement
from tracekern.record.segment import Segment


@pytest.fixture
def segments() -> Iterator[list[Segment]]:
    run = f"agree-test-{os.getpid()}"
    made = [Segment.create(run, rank, metadata(CaptureSpec(), rank), 1 << 16) for rank in (0, 1)]
    yield made
    for segment in made:
        segment.unlink()
        segment.close()


def test_they_sample_before_a_launch_that_all_stand_ready_for(segments: list[Segment]):
    leader, follower = (SampleAgreement(rank, segments) for rank in (0, 1))
    answers: list[bool] = []
    waits = threading.Thread(target=lambda: answers.append(follower.decide(5, due=True)))
    waits.start()
    while segments[1].header["ready_launch"] != 5:
        time.sleep(0.001)
    assert leader.decide(4, due=True) is False, "it stands before another launch"
    assert leader.decide(5, due=False) is True, "the leader's samples need not be due"
    waits.join()
    assert answers == [True]
    assert segments[1].header["ready_launch"] == 0


def test_nobody_samples_where_one_does_not_come(segments: list[Segment]):
    leader, follower = (SampleAgreement(rank, segments) for rank in (0, 1))
    assert leader.decide(7, due=True) is False
    assert follower.decide(7, due=True) is False, "the leader has gone on"
    assert follower.decide(8, due=False) is False
    assert follower.decide(9, due=True) is False, "the leader is still inside launch 8"


def test_they_close_in_order_only_together(segments: list[Segment]):
    first, second = (SampleAgreement(rank, segments) for rank in (0, 1))
    segments[1].header["leaving"] = 1  # in order, and waits
    assert first.leave(in_order=True) is True
    assert second.leave(in_order=False) is False
    assert first.leave(in_order=True) is False
    assert segments[0].header["leaving"] == 2, "whoever comes now does not wait for it"
