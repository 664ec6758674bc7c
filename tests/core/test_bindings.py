"""The extension refuses what would make it read or write where nothing is: a mistake in Python must not end Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracekern import _core
from tracekern.dump import format as fmt


def encoder(num_spans: int = 300, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Of spans side by side on one track; and the dict of their columns."""
    iids = ("open_iid", "released_by_iid", "bytes_iid", "rate_iid", "sent_iid", "released_iid", "flow_category_iid")
    names = dict.fromkeys(("lane_stride", *iids), 1)
    events = [(1, 1, 0, [(1, changes.get("shift", 0), 8, False)], [], False)[: changes.get("values", 6)]]
    tables = {"tracks": [(1, 1)], "events": events, "launches": [], "time_shift": 0, **names}
    times = np.arange(num_spans)
    row = {"track": np.zeros_like(times, np.int32), "event": np.zeros_like(times, np.int32)}
    row["launch"] = np.full_like(times, -1, np.int32)
    payload = np.zeros_like(times, np.uint64)
    spans = {**row, "start": times, "end": times, "draw_end": times, "begin_payload": payload, "end_payload": payload}
    spans["releaser_iid"] = np.zeros_like(times, np.uint32)
    spans["group"] = spans["bytes"] = np.full_like(times, -1)
    spans |= {name: column for name, column in changes.items() if name in spans}
    numbers, payloads, times_of_none = np.zeros(0, np.int32), np.zeros(0, np.uint64), np.zeros(0, np.int64)
    marks = {"track": numbers, "event": numbers, "launch": numbers, "time": times_of_none, "payload": payloads}
    flows = {f"{side}_span": times_of_none for side in ("signal", "early", "wait")}
    flows |= {f"{side}_id": payloads for side in ("signal", "early", "wait")}
    return _core.PerfettoEncoder(tables, spans, marks, flows), spans


@pytest.mark.parametrize(
    "buffer",
    [np.zeros(1000, np.uint8)[::-1], np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1 << 20,), (0,))],
    ids=["backward", "one byte for all"],
)
def test_the_encoder_writes_to_one_piece_of_memory(buffer):
    with pytest.raises(ValueError, match="not contiguous"):
        encoder()[0].fill(buffer)


def test_the_encoder_keeps_its_columns():
    num_spans = 100_000
    wanted, written = bytearray(100 * num_spans), bytearray(100 * num_spans)
    encoder(num_spans)[0].fill(wanted)
    later, spans = encoder(num_spans)
    spans.clear()
    others = [np.full(num_spans, -1, kind) for kind in (np.int32, np.int64) for _ in range(8)]
    assert later.fill(written) > num_spans
    assert written == wanted
    assert len(others) == 16


@pytest.mark.parametrize(
    "changes",
    [{"shift": (1 << 32) - 1}, {"start": np.zeros(300 * 8 + 1, np.uint8)[1:].view(np.int64)}, {"values": 5}],
    ids=["field outside the payload", "column that is not aligned", "row without its last value"],
)
def test_the_encoder_refuses(changes):
    with pytest.raises(ValueError, match="1 to 63 bits|not aligned|another number of values"):
        encoder(**changes)


def test_tracks_may_stand_anywhere_and_records_are_aligned():
    headers, records = np.zeros(1, fmt.TRACK_HEADER), np.zeros(4, fmt.WIDE_RECORD)
    headers["started"], records["word"] = fmt.STARTED, [fmt.RecordKind.MARK] * 3 + [0]
    moved = np.empty(headers.nbytes + 1, np.uint8)[1:]
    moved[:] = headers.view(np.uint8)
    _core.find_records(moved, records.view(np.uint8), False)
    assert moved.view(fmt.TRACK_HEADER)["written"].tolist() == [3]
    with pytest.raises(ValueError, match="aligned"):
        _core.find_records(moved, np.zeros(records.nbytes + 1, np.uint8)[1:], False)


def test_a_rank_is_one_of_those_that_share_the_heap():
    heap = np.zeros(2 * _core.heap_control_bytes, np.uint8)
    start = -(-heap.ctypes.data // _core.heap_control_bytes) * _core.heap_control_bytes
    for rank, heaps, why in (
        (1, [start], "rank 1, wanted one of the 1 that share it"),
        (0, [], "0 ranks, wanted 1 to 64"),
        (0, [start] * 65, "65 ranks, wanted 1 to 64"),
    ):
        with pytest.raises(ValueError, match=f"^symmetric heap: {why}$"):
            _core.CpuCommunicator(rank, heaps, 1)
