"""What the packer finds in the ring of a flight recorder: torn, its laps wrapped, or written while it is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekern import _core
from tracekern.dump import format as fmt

START = 5 << fmt.LAP_SHIFT | (1 << fmt.LAP_SHIFT) - 50  # the low 48 bits wrap after 50 ticks


def write_ring(ring: np.ndarray, start: int, first: int, count: int, dropped: frozenset[int] = frozenset()) -> None:
    """What a launch leaves in a ring: record n is a mark of payload n at start + n; those dropped never arrive.

    first: records before these, which nobody finds any more.
    """
    for number in set(range(count)) - dropped:
        lap, slot = divmod(first + number, len(ring))
        ticks = lap % (1 << 16) << fmt.LAP_SHIFT | (start + number) % (1 << fmt.LAP_SHIFT)
        ring[slot] = (ticks, 0, fmt.RecordKind.MARK | number << fmt.PAYLOAD_SHIFT)


def as_bytes(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint8).reshape(-1)


def read_ring(ring: np.ndarray, **changes: int) -> tuple[np.ndarray, np.void]:
    """The records of a ring that began at START, and what its header then says."""
    headers = np.zeros(1, fmt.TRACK_HEADER)
    for key, value in {"started": fmt.STARTED_RING, "start_ticks": START, **changes}.items():
        headers[key] = value
    _core.find_records(as_bytes(headers), as_bytes(ring), False)
    records = _core.copy_records(as_bytes(headers), as_bytes(ring)).view(fmt.WIDE_RECORD)
    assert len(records) == headers["written"][0]
    return records, headers[0]


@given(
    bits=st.integers(0, 4),
    count=st.integers(0, 80),
    before=st.integers(0, 40),
    lost_at_the_end=st.sets(st.integers(0, 5)),
)
def test_a_torn_ring_gives_the_records_that_arrived(bits, count, before, lost_at_the_end):
    num_slots = 1 << bits
    ring = np.zeros(num_slots, fmt.WIDE_RECORD)
    write_ring(ring, START - 1000, 0, before)  # an earlier launch
    dropped = frozenset(count - 1 - back for back in lost_at_the_end)
    write_ring(ring, START, 0, count, dropped)
    records, header = read_ring(ring)
    arrived = sorted(set(range(count)) - dropped)
    newest = arrived[-1] if arrived else -1
    window = range(max(newest - num_slots + 1, 0), newest + 1)
    wanted = [number for number in window if number not in dropped]
    assert (records["word"] >> fmt.PAYLOAD_SHIFT).tolist() == wanted
    assert records["ticks"].tolist() == [START + number for number in wanted]
    assert int(header["attempted"]) == newest + 1
    assert int(header["missing"]) == len(window) - len(wanted)


def test_a_finished_ring_tells_its_count_beyond_any_number_of_laps():
    ring = np.zeros(4, fmt.WIDE_RECORD)
    first = (4 << 16) + 4  # the lap counts to 2^16, and this launch has come round once
    write_ring(ring, START, first, 6)
    records, header = read_ring(ring, end_ticks=START + 9, attempted=first + 6)
    assert (len(records), int(header["attempted"])) == (4, first + 6)


@pytest.mark.parametrize("laps", [1, (1 << 16) - 1, 1 << 16, 3 << 16])
def test_a_ring_keeps_its_last_records_when_its_laps_have_wrapped(laps):
    ring = np.zeros(4, fmt.WIDE_RECORD)
    write_ring(ring, START, 4 * laps, 6)
    records, header = read_ring(ring)
    assert records["ticks"].tolist() == [START + number for number in range(2, 6)]
    assert int(header["missing"]) == 0


def test_a_finished_ring_takes_nothing_from_days_ago():
    """Half of the times that lap every 78 hours look like the future; the end of the track tells them from it."""
    ring = np.zeros(4, fmt.WIDE_RECORD)
    write_ring(ring, START + (30 * 3600 * 10**9), 0, 4)
    write_ring(ring, START, 0, 2)
    records, header = read_ring(ring, end_ticks=START + 9, attempted=2)
    assert records["ticks"].tolist() == [START, START + 1]
    assert int(header["missing"]) == 0


@pytest.mark.parametrize("later", [0, 3, 40])
def test_a_ring_that_is_written_while_it_is_read_keeps_its_place_in_the_dump(later):
    """As where a capture closes and a kernel runs on."""
    ring = np.zeros(8, fmt.WIDE_RECORD)
    write_ring(ring, START, 0, 5)
    headers = np.zeros(2, fmt.TRACK_HEADER)
    headers["started"], headers["start_ticks"] = fmt.STARTED_RING, START
    rings = np.stack([ring, ring])
    _core.find_records(as_bytes(headers), as_bytes(rings), False)
    rings[0] = 0
    write_ring(rings[0], START, 0, later)
    records = _core.copy_records(as_bytes(headers), as_bytes(rings)).view(fmt.WIDE_RECORD)
    assert len(records) == 10
    assert records[5:]["ticks"].tolist() == [START + number for number in range(5)]
    assert np.count_nonzero(records[:5]["word"]) == min(later, 5)


def test_tracks_of_other_sizes_are_refused():
    headers, ring = np.zeros(2, fmt.TRACK_HEADER), np.zeros(3, fmt.WIDE_RECORD)
    for tracks, records in ((headers, ring), (headers[:1], as_bytes(ring)[:-1]), (headers[:0], ring)):
        with pytest.raises(ValueError, match="whole tracks"):
            _core.find_records(as_bytes(tracks), as_bytes(records), False)
    headers["written"] = 4
    with pytest.raises(ValueError, match="comes first"):
        _core.copy_records(as_bytes(headers[:1]), as_bytes(ring))
    with pytest.raises(TypeError):
        _core.copy_records(headers, as_bytes(ring))
