"""dump/format.py mirrors csrc/trace/record.h; the compiled header says what is right."""

from __future__ import annotations

import numpy as np
import pytest

from tracekern.dump import format as fmt

_core = pytest.importorskip("tracekern._core", reason="the extension is not built")


def offsets(dtype: np.dtype) -> dict[str, int]:
    return {name: offset for name, (_, offset, *_) in dtype.fields.items() if name != "reserved"}


def test_track_header_is_the_compiled_one():
    assert offsets(fmt.TRACK_HEADER) == _core.layout["track_header"]
    assert fmt.TRACK_HEADER.itemsize == _core.layout["track_header_bytes"]


def test_launch_descriptor_is_the_compiled_one():
    assert offsets(fmt.LAUNCH_DESCRIPTOR) == _core.layout["launch_descriptor"]
    assert fmt.LAUNCH_DESCRIPTOR.itemsize == _core.layout["launch_descriptor_bytes"]
    assert fmt.REGION.itemsize == _core.layout["region_bytes"]


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        ("segment_header", fmt.SEGMENT_HEADER),
        ("launch_entry", fmt.LAUNCH_ENTRY),
        ("clock_sample", fmt.CLOCK_SAMPLE),
        ("host_span", fmt.HOST_SPAN),
    ],
)
def test_what_hosts_write_into_a_segment_is_the_compiled_one(part: str, dtype: np.dtype):
    assert {name: offset for name, (_, offset, *_) in dtype.fields.items()} == _core.layout[part]
    assert dtype.itemsize == _core.layout[f"{part}_bytes"]


def test_a_segment_is_marked_as_the_compiled_hosts_do():
    assert _core.layout["segment_magic"] == fmt.SEGMENT_MAGIC
    assert _core.layout["segment_alignment"] == fmt.ALIGNMENT
    assert _core.layout["segment_states"] == (fmt.SegmentState.OPEN, fmt.SegmentState.CLOSED)
    assert _core.layout["sample_kinds"] == tuple(fmt.SampleKind)


def test_records_are_the_compiled_ones():
    assert fmt.WIDE_RECORD.itemsize == _core.layout["wide_record_bytes"] == fmt.RECORD_BYTES
    assert fmt.SPAN_RECORD.itemsize == _core.layout["span_record_bytes"] == fmt.RECORD_BYTES
    assert offsets(fmt.SPAN_RECORD) == _core.layout["span_record"]
    bits = (_core.layout["kind_bits"], _core.layout["event_bits"], _core.layout["payload_low_bits"])
    assert bits == (fmt.KIND_BITS, fmt.EVENT_BITS, fmt.PAYLOAD_LOW_BITS)
    started = (_core.layout["started_ring"], _core.layout["started_cycles"])
    assert (_core.layout["lap_shift"], *started) == (fmt.LAP_SHIFT, fmt.STARTED_RING, fmt.STARTED_CYCLES)
    assert tuple(_core.layout["record_formats"]) == fmt.RECORD_FORMATS
    assert _core.layout["generation_shift"] == fmt.GENERATION_SHIFT
    assert _core.layout["started_again"] == fmt.STARTED_AGAIN
    assert _core.layout["entry_reserved"] == fmt.ENTRY_RESERVED
    assert _core.layout["address_bits"] == fmt.ADDRESS_BITS
    assert _core.layout["max_anchor_cycles"] == fmt.MAX_ANCHOR_CYCLES


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
