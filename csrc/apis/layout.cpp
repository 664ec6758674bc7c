// The file format as the compiler sees it, for the test that compares it with tracekern/dump/format.py.
#include <pybind11/pybind11.h>

#include "apis/names.hpp"
#include "apis/register.hpp"
#include "comm/fault.h"
#include "trace/record.h"
#include "trace/segment.h"

namespace py = pybind11;

namespace tracekern {
namespace {

py::dict track_header_offsets() {
    py::dict offsets;
    offsets["start_ticks"] = offsetof(TrackHeader, start_ticks);
    offsets["sm"] = offsetof(TrackHeader, sm);
    offsets["started"] = offsetof(TrackHeader, started);
    offsets["role"] = offsetof(TrackHeader, role);
    offsets["end_ticks"] = offsetof(TrackHeader, end_ticks);
    offsets["written"] = offsetof(TrackHeader, written);
    offsets["attempted"] = offsetof(TrackHeader, attempted);
    offsets["elapsed_cycles"] = offsetof(TrackHeader, elapsed_cycles);
    offsets["epoch"] = offsetof(TrackHeader, epoch);
    offsets["missing"] = offsetof(TrackHeader, missing);
    offsets["block"] = offsetof(TrackHeader, block);
    offsets["launch_idx"] = offsetof(TrackHeader, launch_idx);
    offsets["warp"] = offsetof(TrackHeader, starts);  // its halves, in a dump
    offsets["finished"] = offsetof(TrackHeader, starts) + sizeof(uint16_t);
    offsets["warps_run"] = offsetof(TrackHeader, warps_run);
    return offsets;
}

py::dict span_record_offsets() {
    py::dict offsets;
    offsets["end"] = offsetof(SpanRecord, end);
    offsets["payload_high"] = offsetof(SpanRecord, payload_high);
    offsets["begin"] = offsetof(SpanRecord, begin);
    offsets["word"] = offsetof(SpanRecord, word);
    return offsets;
}

py::dict launch_descriptor_offsets() {
    py::dict offsets;
    offsets["headers"] = offsetof(LaunchDescriptor, region.headers);
    offsets["records"] = offsetof(LaunchDescriptor, region.records);
    offsets["event_mask"] = offsetof(LaunchDescriptor, event_mask);
    offsets["of_replay"] = offsetof(LaunchDescriptor, of_replay);
    offsets["records_per_track"] = offsetof(LaunchDescriptor, records_per_track);
    offsets["warps_per_block"] = offsetof(LaunchDescriptor, warps_per_block);
    offsets["generation"] = offsetof(LaunchDescriptor, generation);
    offsets["block_first"] = offsetof(LaunchDescriptor, block_first);
    offsets["block_stop"] = offsetof(LaunchDescriptor, block_stop);
    offsets["block_step"] = offsetof(LaunchDescriptor, block_step);
    offsets["role_mask"] = offsetof(LaunchDescriptor, role_mask);
    offsets["num_blocks"] = offsetof(LaunchDescriptor, num_blocks);
    offsets["replay"] = offsetof(LaunchDescriptor, replay);
    return offsets;
}

py::dict fault_record_offsets() {
    py::dict offsets;
    offsets["claimed"] = offsetof(FaultRecord, claimed);
    offsets["cause"] = offsetof(FaultRecord, cause);
    offsets["stage"] = offsetof(FaultRecord, stage);
    offsets["channel"] = offsetof(FaultRecord, channel);
    offsets["rank"] = offsetof(FaultRecord, rank);
    offsets["peer"] = offsetof(FaultRecord, peer);
    offsets["block"] = offsetof(FaultRecord, block);
    offsets["warp"] = offsetof(FaultRecord, warp);
    offsets["slot"] = offsetof(FaultRecord, slot);
    offsets["wanted_epoch"] = offsetof(FaultRecord, wanted_epoch);
    offsets["seen_epoch"] = offsetof(FaultRecord, seen_epoch);
    offsets["seen_value"] = offsetof(FaultRecord, seen_value);
    offsets["waited_ns"] = offsetof(FaultRecord, waited_ticks);  // ticks of both backends are ns
    offsets["aborted_by"] = offsetof(FaultRecord, aborted_by);
    offsets["on_timeout"] = offsetof(FaultRecord, on_timeout);
    offsets["version"] = offsetof(FaultRecord, version);
    offsets["wanted_value"] = offsetof(FaultRecord, wanted_value);
    offsets["role"] = offsetof(FaultRecord, role);
    offsets["ring"] = offsetof(FaultRecord, ring);
    offsets["head"] = offsetof(FaultRecord, head);
    offsets["tail"] = offsetof(FaultRecord, tail);
    offsets["refusal"] = offsetof(FaultRecord, refusal);
    return offsets;
}

#define TK_OFFSET(type, name) offsets[#name] = offsetof(Row, name);
py::dict segment_header_offsets() {
    using Row = SegmentHeader;
    py::dict offsets;
    TK_SEGMENT_HEADER(TK_OFFSET)
    return offsets;
}

py::dict launch_entry_offsets() {
    using Row = LaunchEntry;
    py::dict offsets;
    TK_LAUNCH_ENTRY(TK_OFFSET)
    return offsets;
}

py::dict clock_sample_offsets() {
    using Row = ClockSample;
    py::dict offsets;
    TK_CLOCK_SAMPLE(TK_OFFSET)
    return offsets;
}

py::dict host_span_offsets() {
    using Row = HostSpan;
    py::dict offsets;
    TK_HOST_SPAN(TK_OFFSET)
    return offsets;
}
#undef TK_OFFSET

}  // namespace

void register_layout(py::module_& module) {
    py::dict layout;
    layout["segment_header"] = segment_header_offsets();
    layout["segment_header_bytes"] = sizeof(SegmentHeader);
    layout["segment_magic"] = py::bytes(kSegmentMagic);
    layout["segment_states"] =
        py::make_tuple(static_cast<uint32_t>(SegmentState::open), static_cast<uint32_t>(SegmentState::closed));
    layout["segment_alignment"] = kSegmentAlignment;
    layout["launch_entry"] = launch_entry_offsets();
    layout["launch_entry_bytes"] = sizeof(LaunchEntry);
    layout["clock_sample"] = clock_sample_offsets();
    layout["clock_sample_bytes"] = sizeof(ClockSample);
    layout["sample_kinds"] = py::make_tuple(static_cast<uint32_t>(SampleKind::ping_pong),
                                            static_cast<uint32_t>(SampleKind::host_bracket),
                                            static_cast<uint32_t>(SampleKind::wall_clock));
    layout["track_header"] = track_header_offsets();
    layout["track_header_bytes"] = sizeof(TrackHeader);
    layout["launch_descriptor"] = launch_descriptor_offsets();
    layout["launch_descriptor_bytes"] = sizeof(LaunchDescriptor);
    layout["region_bytes"] = sizeof(ReplayRegion);
    layout["fault_record"] = fault_record_offsets();
    layout["fault_record_bytes"] = sizeof(FaultRecord);
    layout["span_record"] = span_record_offsets();
    layout["span_record_bytes"] = sizeof(SpanRecord);
    layout["wide_record_bytes"] = sizeof(WideRecord);
    layout["kind_bits"] = kKindBits;
    layout["event_bits"] = kEventBits;
    layout["payload_low_bits"] = kPayloadLowBits;
    layout["lap_shift"] = kLapShift;
    layout["host_span"] = host_span_offsets();
    layout["host_span_bytes"] = sizeof(HostSpan);
    layout["generation_shift"] = kGenerationShift;
    layout["entry_reserved"] = kEntryReserved;
    layout["address_bits"] = ReplayRegion::kAddressBits;
    layout["record_formats"] = names_list(kRecordFormatNames);
    layout["started_ring"] = kStartedRing;
    layout["started_cycles"] = kStartedCycles;
    layout["started_again"] = kStartedAgain;
    layout["max_anchor_cycles"] = kMaxAnchorCycles;
    module.attr("layout") = layout;
}

}  // namespace tracekern
