"""Begins and ends joined over many tracks at once, against a stack for each track."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekern.timeline.decode.pairing import pair

Record = tuple[int, bool, int]  # track, is it a begin, event


def by_hand(records: list[Record]) -> dict[int, int]:
    """begin -> its end; an end closes the innermost begin of its event, and those inside it stay open."""
    open_begins: dict[int, list[int]] = {}
    closed = {}
    for place, (track, is_begin, event) in enumerate(records):
        stack = open_begins.setdefault(track, [])
        if is_begin:
            stack.append(place)
        elif any(records[begin][2] == event for begin in stack):
            while records[stack[-1]][2] != event:
                stack.pop()
            closed[stack.pop()] = place
    return closed


def assert_paired(records: list[Record]) -> None:
    track, is_begin, event = (np.array(column) for column in zip(*records, strict=True))
    found = pair(is_begin.astype(bool), event.astype(np.uint8), track.astype(np.int32))
    closed = by_hand(records)
    begins = [place for place, record in enumerate(records) if record[1]]
    assert found.begin.tolist() == begins
    assert found.end.tolist() == [closed.get(begin, -1) for begin in begins]
    ends = set(range(len(records))) - set(begins)
    assert found.orphan.tolist() == sorted(ends - set(closed.values()))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 2)), min_size=1, max_size=40))
def test_any_records_of_any_tracks(records: list[Record]):
    assert_paired(sorted(records, key=lambda record: record[0]))


@pytest.mark.parametrize("depth", [30, 31, 32, 33, 200])
def test_deep_nesting(depth: int):
    events = [number % 3 for number in range(depth)]
    nested = [(True, event) for event in events] + [(False, event) for event in reversed(events)]
    torn = [*nested[:-5], (True, 1), (False, 2), *nested[-4:]]
    assert_paired([(track, *record) for track, records in enumerate((nested, torn, nested)) for record in records])
