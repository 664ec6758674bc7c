// Field numbers are those of perfetto/trace/trace_packet.proto and track_event.proto; tags below are field << 3 | wire
// type.
#include "encode/perfetto.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace tracekern::encode {
namespace {

constexpr uint8_t kTracePacket = 0x0a;                 // Trace.packet
constexpr uint8_t kTimestamp = 0x40;                   // TracePacket.timestamp
constexpr uint8_t kTrackEvent = 0x5a;                  // TracePacket.track_event
constexpr uint8_t kSequenceId = 0x50;                  // TracePacket.trusted_packet_sequence_id
constexpr uint8_t kSequenceFlags = 0x68;               // TracePacket.sequence_flags
constexpr uint8_t kNeedsIncrementalState = 2;          // ... its value
constexpr uint8_t kType = 0x48;                        // TrackEvent.type
constexpr uint8_t kTrackUuid = 0x58;                   // TrackEvent.track_uuid
constexpr uint8_t kNameIid = 0x50;                     // TrackEvent.name_iid
constexpr uint8_t kCategoryIids = 0x18;                // TrackEvent.category_iids
constexpr uint8_t kDebugAnnotations = 0x22;            // TrackEvent.debug_annotations
constexpr uint8_t kAnnotationNameIid = 0x08;           // DebugAnnotation.name_iid
constexpr uint32_t kAnnotationBool = 2 << 3;           // DebugAnnotation.bool_value
constexpr uint32_t kAnnotationInt = 4 << 3;            // DebugAnnotation.int_value
constexpr uint8_t kAnnotationDouble = 5 << 3 | 1;      // DebugAnnotation.double_value
constexpr uint32_t kAnnotationTextIid = 17 << 3;       // DebugAnnotation.string_value_iid
constexpr uint32_t kFlowIds = 47 << 3 | 1;             // TrackEvent.flow_ids
constexpr uint32_t kTerminatingFlowIds = 48 << 3 | 1;  // TrackEvent.terminating_flow_ids

enum EventType : uint8_t { kSliceBegin = 1, kSliceEnd = 2, kInstant = 3 };

constexpr size_t kMaxAnnotationBytes = 24;
// Tags, lengths, time, uuid, name, category, sequence, `open` and `released_by`; the group; bytes and their rate.
constexpr size_t kFixedPacketBytes = 112 + 2 * kMaxAnnotationBytes;
constexpr size_t kFlowIdBytes = 10;

// A packet with one track event; the body goes between construction and finish().
class Packet {
public:
    Packet(ProtoWriter& writer, int64_t time, EventType type, uint64_t uuid) : writer_(writer) {
        packet_length_ = writer_.open_message(kTracePacket);
        writer_.byte(kTimestamp);
        writer_.varint(static_cast<uint64_t>(time));
        event_length_ = writer_.open_message(kTrackEvent);
        writer_.byte(kType);
        writer_.byte(type);
        writer_.byte(kTrackUuid);
        writer_.varint(uuid);
    }

    void name(uint32_t name_iid, uint32_t category_iid) {
        writer_.byte(kNameIid);
        writer_.varint(name_iid);
        writer_.byte(kCategoryIids);
        writer_.varint(category_iid);
    }

    void fields(const std::vector<FieldEncoding>& fields, uint64_t payload) {
        for (const FieldEncoding& field : fields) {
            uint64_t value = payload >> field.shift & ((uint64_t{1} << field.bits) - 1);
            if (field.is_signed && (value >> (field.bits - 1) & 1)) value |= ~uint64_t{0} << field.bits;
            annotation(field.name_iid, kAnnotationInt, value);
        }
    }

    void annotation(uint32_t name_iid, uint32_t value_tag, uint64_t value) {
        MessageByte* length = writer_.open_message(kDebugAnnotations);
        writer_.byte(kAnnotationNameIid);
        writer_.varint(name_iid);
        writer_.varint(value_tag);
        writer_.varint(value);
        writer_.close_message(length);
    }

    void real_annotation(uint32_t name_iid, double value) {
        MessageByte* length = writer_.open_message(kDebugAnnotations);
        writer_.byte(kAnnotationNameIid);
        writer_.varint(name_iid);
        writer_.byte(kAnnotationDouble);
        writer_.fixed64(std::bit_cast<uint64_t>(value));
        writer_.close_message(length);
    }

    void encoded(const std::string& bytes) { writer_.bytes(bytes.data(), bytes.size()); }

    void flows(uint32_t tag, const FlowEnds& flows, size_t first, size_t count) {
        for (size_t i = first; i < first + count; ++i) {
            writer_.varint(tag);
            writer_.fixed64(flows.id[i]);
        }
    }

    void finish(uint32_t sequence) {
        writer_.close_message(event_length_);
        writer_.byte(kSequenceId);
        writer_.varint(sequence);
        writer_.byte(kSequenceFlags);
        writer_.byte(kNeedsIncrementalState);
        writer_.close_message(packet_length_);
    }

private:
    ProtoWriter& writer_;
    MessageByte* packet_length_;
    MessageByte* event_length_;
};

// The flow ends of `span` from `cursor` on; the cursor moves past them.
size_t take_flows(const FlowEnds& flows, size_t& cursor, size_t span) {
    const size_t first = cursor;
    while (cursor < flows.count && static_cast<size_t>(flows.span[cursor]) == span) ++cursor;
    return cursor - first;
}

size_t max_flows_of_a_span(const FlowEnds& flows) {
    size_t most = 0;
    for (size_t i = 0; i < flows.count;) {
        size_t next = i;
        most = std::max(most, take_flows(flows, next, static_cast<size_t>(flows.span[i])));
        i = next;
    }
    return most;
}

}  // namespace

PerfettoEncoder::PerfettoEncoder(TraceTables tables,
                                 const SpanColumns& spans,
                                 const MarkColumns& marks,
                                 const FlowColumns& flows)
    : tables_(std::move(tables)), spans_(spans), marks_(marks), flows_(flows), lanes_per_track_(tables_.tracks.size()) {
    size_t most_fields = 0;
    for (const EventEncoding& event : tables_.events) {
        most_fields = std::max({most_fields, event.begin_fields.size(), event.end_fields.size()});
    }
    size_t most_annotation_bytes = 0;
    for (const LaunchEncoding& launch : tables_.launches) {
        most_annotation_bytes = std::max({most_annotation_bytes, launch.annotations.size(), launch.shape.size()});
    }
    const size_t most_flows =
        max_flows_of_a_span(flows_.signals) + max_flows_of_a_span(flows_.early) + max_flows_of_a_span(flows_.waits);
    // A begin or an end, each with the instant its flows may need.
    max_packet_bytes_ =
        2 * kFixedPacketBytes + most_fields * kMaxAnnotationBytes + most_annotation_bytes + most_flows * kFlowIdBytes;
}

size_t PerfettoEncoder::fill(uint8_t* out, size_t capacity) {
    ProtoWriter writer(out);
    const uint8_t* limit = out + capacity - max_packet_bytes_;
    if (encode_spans(writer, limit)) encode_marks(writer, limit);
    return static_cast<size_t>(writer.cursor() - out);
}

// False when the buffer is full; the next call goes on where this one stopped.
bool PerfettoEncoder::encode_spans(ProtoWriter& writer, const uint8_t* limit) {
    for (;;) {
        const bool same_track = next_span_ < spans_.count && spans_.track[next_span_] == current_track_;
        const int64_t horizon = same_track ? spans_.start[next_span_] : kEndOfTime;
        for (int lane = lanes_.lane_to_close(horizon); lane >= 0; lane = lanes_.lane_to_close(horizon)) {
            if (writer.cursor() > limit) return false;
            end_span(writer, lanes_.close(lane));
        }
        if (!same_track) finish_track();
        if (next_span_ == spans_.count) return true;
        if (writer.cursor() > limit) return false;
        begin_span(writer);
    }
}

void PerfettoEncoder::finish_track() {
    if (current_track_ >= 0) lanes_per_track_[current_track_] = static_cast<uint32_t>(lanes_.count());
    lanes_.clear();
    current_track_ = next_span_ < spans_.count ? spans_.track[next_span_] : -1;
}

void PerfettoEncoder::begin_span(ProtoWriter& writer) {
    const size_t i = next_span_++;
    const EventEncoding& event = tables_.events[spans_.event[i]];
    const int lane = lanes_.find(spans_.draw_end[i]);
    const uint64_t uuid = tables_.tracks[current_track_].uuid + static_cast<uint64_t>(lane) * tables_.lane_stride;
    const int64_t time = spans_.start[i] + tables_.time_shift;

    Packet packet(writer, time, kSliceBegin, uuid);
    packet.name(name_of(event, spans_.launch[i], spans_.begin_payload[i]), event.category_iid);
    packet.fields(event.begin_fields, spans_.begin_payload[i]);
    if (spans_.launch[i] >= 0) {
        const LaunchEncoding& launch = tables_.launches[spans_.launch[i]];
        // A launch's own span names its launch and has the epoch among its fields.
        packet.encoded(event.name_source == NameSource::launch ? launch.shape : launch.annotations);
        if (spans_.group[i] >= 0) {
            packet.annotation(launch.group_iid, kAnnotationInt, static_cast<uint64_t>(spans_.group[i]));
        }
    }
    if (spans_.end[i] == kOpenEnd) packet.annotation(tables_.open_iid, kAnnotationBool, 1);
    const size_t first_signal = next_signal_;
    packet.flows(kFlowIds, flows_.signals, first_signal, take_flows(flows_.signals, next_signal_, i));
    packet.finish(current_sequence());

    const size_t first_early = next_early_;
    if (const size_t count = take_flows(flows_.early, next_early_, i)) {
        flow_instant(writer, time, uuid, tables_.sent_iid, flows_.early, first_early, count);
    }
    const size_t first_wait = next_wait_;
    const size_t num_waits = take_flows(flows_.waits, next_wait_, i);
    lanes_.open(lane, {spans_.draw_end[i], i, uuid, first_wait, num_waits});
}

void PerfettoEncoder::end_span(ProtoWriter& writer, const OpenSpan& open) const {
    const int64_t time = open.end + tables_.time_shift;
    // Arrows end at the start of a slice, so the end of a wait gets a slice of its own: an instant inside the wait.
    if (open.num_flows > 0) {
        flow_instant(writer, time, open.uuid, tables_.released_iid, flows_.waits, open.first_flow, open.num_flows);
    }
    Packet packet(writer, time, kSliceEnd, open.uuid);
    const EventEncoding& event = tables_.events[spans_.event[open.span_idx]];
    if (spans_.end[open.span_idx] != kOpenEnd) packet.fields(event.end_fields, spans_.end_payload[open.span_idx]);
    if (const int64_t bytes = spans_.bytes[open.span_idx]; bytes >= 0) {
        packet.annotation(tables_.bytes_iid, kAnnotationInt, static_cast<uint64_t>(bytes));
        const int64_t length = open.end - spans_.start[open.span_idx];
        if (event.has_rate && length > 0) {
            const double rate = static_cast<double>(bytes) / static_cast<double>(length);
            packet.real_annotation(tables_.rate_iid, std::nearbyint(rate * 100) / 100);
        }
    }
    if (const uint32_t releaser_iid = spans_.releaser_iid[open.span_idx]) {
        packet.annotation(tables_.released_by_iid, kAnnotationTextIid, releaser_iid);
    }
    packet.finish(current_sequence());
}

void PerfettoEncoder::flow_instant(ProtoWriter& writer,
                                   int64_t time,
                                   uint64_t uuid,
                                   uint32_t name_iid,
                                   const FlowEnds& flows,
                                   size_t first,
                                   size_t count) const {
    Packet packet(writer, time, kInstant, uuid);
    packet.name(name_iid, tables_.flow_category_iid);
    packet.flows(name_iid == tables_.sent_iid ? kFlowIds : kTerminatingFlowIds, flows, first, count);
    packet.finish(current_sequence());
}

bool PerfettoEncoder::encode_marks(ProtoWriter& writer, const uint8_t* limit) {
    for (; next_mark_ < marks_.count; ++next_mark_) {
        if (writer.cursor() > limit) return false;
        const size_t i = next_mark_;
        const EventEncoding& event = tables_.events[marks_.event[i]];
        const TrackEncoding& track = tables_.tracks[marks_.track[i]];
        Packet packet(writer, marks_.time[i] + tables_.time_shift, kInstant, track.uuid);
        packet.name(name_of(event, marks_.launch[i], marks_.payload[i]), event.category_iid);
        packet.fields(event.begin_fields, marks_.payload[i]);
        if (marks_.launch[i] >= 0) packet.encoded(tables_.launches[marks_.launch[i]].annotations);
        packet.finish(track.sequence);
    }
    return true;
}

uint32_t PerfettoEncoder::name_of(const EventEncoding& event, int32_t launch, uint64_t payload) const {
    switch (event.name_source) {
        case NameSource::launch:
            return launch >= 0 ? tables_.launches[launch].name_iid : event.name_iid;
        case NameSource::payload:
            return event.name_iid + static_cast<uint32_t>(payload);
        case NameSource::event:
            break;
    }
    return event.name_iid;
}

}  // namespace tracekern::encode
