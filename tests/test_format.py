"""dump/format.py mirrors csrc/trace/record.h; the compiled header says what is right."""

from __future__ import annotations

import numpy as np
import pytest

from tracekern.dump import format as fmt

_C = pytest.importorskip("tracekern._C", reason="the extension is not built")


def offsets(dtype: np.dtype) -> dict[str, int]:
    return {name: offset for name, (_, offset, *_) in dtype.fields.items() if name != "reserved"}


def test_track_header_is_the_compiled_one():
    assert offsets(fmt.TRACK_HEADER) == _C.layout["track_header"]
    assert fmt.TRACK_HEADER.itemsize == _C.layout["track_header_bytes"]


def test_launch_descriptor_is_the_compiled_one():
    assert offsets(fmt.LAUNCH_DESCRIPTOR) == _C.layout["launch_descriptor"]
    assert fmt.LAUNCH_DESCRIPTOR.itemsize == _C.layout["launch_descriptor_bytes"]
    assert fmt.REGION.itemsize == _C.layout["region_bytes"]


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        ("segment_header", fmt.SEGMENT_HEADER),
        ("launch_entry", fmt.LAUNCH_ENTRY),
        ("clock_sample", fmt.CLOCK_SAMPLE),
    ],
)
def test_what_hosts_write_into_a_segment_is_the_compiled_one(part: str, dtype: np.dtype):
    assert {name: offset for name, (_, offset, *_) in dtype.fields.items()} == _C.layout[part]
    assert dtype.itemsize == _C.layout[f"{part}_bytes"]


def test_a_segment_is_marked_as_the_compiled_hosts_do():
    assert _C.layout["segment_magic"] == fmt.SEGMENT_MAGIC
    assert _C.layout["segment_alignment"] == fmt.ALIGNMENT
    assert _C.layout["segment_states"] == (fmt.SegmentState.OPEN, fmt.SegmentState.CLOSED)
    assert _C.layout["sample_kinds"] == (fmt.SampleKind.PING_PONG, fmt.SampleKind.HOST_BRACKET)


def test_records_are_the_compiled_ones():
    assert fmt.WIDE_RECORD.itemsize == _C.layout["wide_record_bytes"] == fmt.RECORD_BYTES
    assert fmt.SPAN_RECORD.itemsize == _C.layout["span_record_bytes"] == fmt.RECORD_BYTES
    assert offsets(fmt.SPAN_RECORD) == _C.layout["span_record"]
    bits = (_C.layout["kind_bits"], _C.layout["event_bits"], _C.layout["payload_low_bits"])
    assert bits == (fmt.KIND_BITS, fmt.EVENT_BITS, fmt.PAYLOAD_LOW_BITS)
    started = (_C.layout["started_ring"], _C.layout["started_cycles"])
    assert (_C.layout["lap_shift"], *started) == (fmt.LAP_SHIFT, fmt.STARTED_RING, fmt.STARTED_CYCLES)
    assert tuple(_C.layout["record_formats"]) == fmt.RECORD_FORMATS
    assert _C.layout["generation_shift"] == fmt.GENERATION_SHIFT
    assert _C.layout["started_again"] == fmt.STARTED_AGAIN
    assert _C.layout["address_bits"] == fmt.ADDRESS_BITS
    assert _C.layout["max_anchor_cycles"] == fmt.MAX_ANCHOR_CYCLES


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [
        (fmt.LAUNCH_ENTRY, 352),
        (fmt.SEGMENT_HEADER, 256),
        (fmt.CLOCK_SAMPLE, 48),
        (fmt.HOST_SPAN, 128),
        (fmt.DUMP_HEADER, 64),
    ],
)
def test_sizes_that_the_documentation_promises(dtype: np.dtype, num_bytes: int):
    assert dtype.itemsize == num_bytes
