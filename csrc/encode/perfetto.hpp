// Columns of spans, marks and flows -> Perfetto track events, piece by piece.
// Python writes the descriptors, the interned names and the metadata; this writes the packets that are many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "encode/lanes.hpp"
#include "encode/protobuf.hpp"

namespace tracekern::encode {

constexpr int64_t kOpenEnd = -1;

// Of each row an index into the tables; launch: -1 for none.
struct RowColumns {
    const int32_t* track;
    const int32_t* event;
    const int32_t* launch;
};

struct SpanColumns : RowColumns {
    const int64_t* start;
    const int64_t* end;       // kOpenEnd: never closed
    const int64_t* draw_end;  // where the picture ends it; equals `end` for closed spans
    const uint64_t* begin_payload;
    const uint64_t* end_payload;
    const uint32_t* releaser_iid;  // of the text that says what released a wait; 0: none
    const int64_t* group;          // number of the warp group, under the name that its launch gives; -1: none
    const int64_t* bytes;          // that it moved or announced; -1: not known
    size_t count;
};

struct MarkColumns : RowColumns {
    const int64_t* time;
    const uint64_t* payload;
    size_t count;
};

// Ends of flows in order of the span they belong to.
struct FlowEnds {
    const int64_t* span;
    const uint64_t* id;
    size_t count;
};

struct FlowColumns {
    FlowEnds signals;  // arrows that leave from the end of the signal
    FlowEnds early;    // arrows that leave from its start: the waiter saw the flag before the signal's span closed
    FlowEnds waits;
};

struct FieldEncoding {
    uint32_t name_iid;
    uint32_t shift;
    uint32_t bits;
    bool is_signed;
};

enum class NameSource { event, launch, payload };

struct EventEncoding {
    uint32_t name_iid;  // for NameSource::payload: the iid of name 0
    uint32_t category_iid;
    NameSource name_source;
    std::vector<FieldEncoding> begin_fields;
    std::vector<FieldEncoding> end_fields;
    bool has_rate;  // its spans last as long as their bytes move
};

struct LaunchEncoding {
    uint32_t name_iid;
    std::string annotations;  // encoded, the same for each span of the launch
    std::string shape;        // encoded, of the launch's own span
    uint32_t group_iid;
};

struct TrackEncoding {
    uint64_t uuid;
    uint32_t sequence;
};

struct TraceTables {
    std::vector<TrackEncoding> tracks;
    std::vector<EventEncoding> events;
    std::vector<LaunchEncoding> launches;
    uint64_t lane_stride;  // lane l of a track has uuid + l * lane_stride
    int64_t time_shift;    // added to every time: Perfetto's are unsigned
    uint32_t open_iid;     // annotation `open: true` of a span that never closed
    uint32_t released_by_iid;
    uint32_t bytes_iid;
    uint32_t rate_iid;  // bytes a ns, which are GB/s
    uint32_t sent_iid;  // names of the instants that flows start from and end at
    uint32_t released_iid;
    uint32_t flow_category_iid;
};

class PerfettoEncoder {
public:
    PerfettoEncoder(TraceTables tables, const SpanColumns& spans, const MarkColumns& marks, const FlowColumns& flows);

    // Room that fill() needs at least.
    size_t max_packet_bytes() const { return max_packet_bytes_; }

    // Writes whole packets; returns the number of bytes, 0 when everything is written.
    size_t fill(uint8_t* out, size_t capacity);

    size_t spans_written() const { return next_span_; }
    const std::vector<uint32_t>& lanes_per_track() const { return lanes_per_track_; }

private:
    struct OpenSpan {
        int64_t end;
        uint64_t span_idx;
        uint64_t uuid;
        size_t first_flow;  // of flows_.waits
        size_t num_flows;
    };

    bool encode_spans(ProtoWriter& writer, const uint8_t* limit);
    bool encode_marks(ProtoWriter& writer, const uint8_t* limit);
    void begin_span(ProtoWriter& writer);
    void end_span(ProtoWriter& writer, const OpenSpan& open) const;
    void finish_track();
    void flow_instant(ProtoWriter& writer,
                      int64_t time,
                      uint64_t uuid,
                      uint32_t name_iid,
                      const FlowEnds& flows,
                      size_t first,
                      size_t count) const;
    uint32_t name_of(const EventEncoding& event, int32_t launch, uint64_t payload) const;
    uint32_t current_sequence() const { return tables_.tracks[current_track_].sequence; }

    TraceTables tables_;
    SpanColumns spans_;
    MarkColumns marks_;
    FlowColumns flows_;
    size_t max_packet_bytes_;

    Lanes<OpenSpan> lanes_;
    std::vector<uint32_t> lanes_per_track_;
    int32_t current_track_ = -1;
    size_t next_span_ = 0;
    size_t next_mark_ = 0;
    size_t next_signal_ = 0;
    size_t next_early_ = 0;
    size_t next_wait_ = 0;
};

}  // namespace tracekern::encode
