// The recorder of a capture that keeps the first records of each track: one record of 16 bytes a span.
//
// A span takes its place when it begins, so that records stand in the order of their begins, and what begins can end.
// Work is stored once, when it ends. Waits, signals and syncs are stored when they begin and completed when they end:
// what a hung kernel was waiting for is on record.
#pragma once

#include "trace/writer.h"

namespace tracekern {

// A span that has begun: where its record goes, and what is known of it.
struct OpenSpan {
    SpanRecord* stop = nullptr;  // the end of its place: where the track went on, so that it takes no copy
    uint32_t begin = 0;
    uint32_t word = 0;
    uint32_t payload_high = 0;
    bool has_room = false;
};

template <uint32_t kMostLevel>
class Recorder<true, RecordFormat::span, kMostLevel> {
public:
    static constexpr bool kTraced = true;
    static constexpr RecordFormat kFormat = RecordFormat::span;
    static constexpr uint32_t kLevel = kMostLevel;
    using Open = OpenSpan;
    struct Args {
        using Rec = Recorder;
        LaunchDescriptor launch;
    };

    // `role` names the track; one that the descriptor does not select records nothing, one beyond the 32 that there can
    // be is selected by its last 5 bits: a reader tells of it. `epoch` is asked for in a graph; elsewhere
    // capture.launch() stated it.
    TK_DEVICE Recorder(const Args& args, const Warp& warp, uint32_t role = 0, uint32_t epoch = 0) : epoch_(epoch) {
        detail::find_and_start(
            args.launch, warp, role, [&](const detail::Track& track, uint32_t sm) { start(track, warp, sm, role); });
    }
    Recorder(const Recorder&) = delete;

    TK_DEVICE ~Recorder() {
        if (state_ == 0) return;
        const uint32_t attempted = num_appended(first_, next_);
        const uint32_t first = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first_));
        const uint32_t room = limit_ ? (limit_ - first) / static_cast<uint32_t>(sizeof(SpanRecord)) : 0;
        detail::store_quarter(header_, 1, true, read_clock(), attempted < room ? attempted : room, attempted);
        detail::store_quarter(header_, 2, state_ & detail::kTellsEpoch, 0, epoch_, 0);
    }

    template <auto kEvent, class... Values>
    TK_DEVICE Open begin(Values... values) {
        const Open open = take<kEvent>(RecordKind::span, detail::pack_fields<kEvent, false>(values...));
        return open_at<kEvent>(open, read_clock());
    }

    // Both return the ticks of the end.
    template <auto kEvent, class... Values>
    TK_DEVICE uint64_t end(const Open& open, Values... values) {
        const uint64_t payload = detail::pack_fields<kEvent, true>(values...);
        return finish<kEvent>(open, sizeof...(Values) == 0 ? read_clock() : read_clock_after(payload), payload);
    }
    template <auto kEvent, class... Values>
    TK_DEVICE uint64_t end_after(const Open& open, uint64_t value, Values... values) {
        return finish<kEvent>(open, read_clock_after(value), detail::pack_fields<kEvent, true>(values...));
    }
    // A block barrier whose result is there when the last warp has arrived, so that a clock read can wait for it.
    template <class AnyWarp>
    TK_DEVICE uint32_t block_sync(AnyWarp& warp) {
        return warp.block_sync_count();
    }

    // The span never ends.
    template <auto kEvent>
    TK_DEVICE void leave_open(const Open& open) {
        if constexpr (!is_stored_first<kEvent>) store(open, open.begin - 1);
    }

    // A span that goes on no record, and is not counted.
    TK_DEVICE Open unrecorded() const {
        Open open;
        open.stop = next_;  // as of a span on record: it takes no register
        return open;
    }
    // The span of kEvent that was recorded last gives its place back: it is as if it had not been recorded.
    template <auto kEvent>
    TK_DEVICE void take_back_if(bool unwanted) {
        const uint32_t step = unwanted & event_mask_ >> static_cast<uint32_t>(kEvent) ? sizeof(SpanRecord) : 0;
        const auto at = reinterpret_cast<uintptr_t>(next_);
        next_ = reinterpret_cast<SpanRecord*>(at - static_cast<uint32_t>(at) + (static_cast<uint32_t>(at) - step));
    }

    template <auto kEvent, class... Values>
    TK_DEVICE void mark(Values... values) {
        mark_at<kEvent>(read_clock(), values...);
    }
    template <auto kEvent, class... Values>
    TK_DEVICE void mark_at(uint64_t ticks, Values... values) {
        Open open = take<kEvent>(RecordKind::mark, detail::pack_fields<kEvent, false>(values...));
        open.begin = low_units(ticks);
        store(open, open.begin);
    }

    // For Sequence, which begins a span at the ticks that end the one before. Which class that one has is not known
    // here; it is stored whole, whether it has been stored when it began or not.
    TK_DEVICE uint64_t now() const { return read_clock(); }
    template <auto kEvent, class... Values>
    TK_DEVICE Open begin_at(uint64_t ticks, Values... values) {
        return open_at<kEvent>(take<kEvent>(RecordKind::span, detail::pack_fields<kEvent, false>(values...)), ticks);
    }
    TK_DEVICE void end_at(const Open& open, uint64_t ticks) { store(open, low_units(ticks)); }

private:
    template <auto kEvent>
    static constexpr bool is_stored_first = event_info<kEvent>.event_class != EventClass::work;

    TK_DEVICE static uint32_t low_units(uint64_t ticks) { return static_cast<uint32_t>(ticks >> kClockShift); }

    // Takes the next place of the track, if the event is wanted and there is room.
    template <auto kEvent>
    TK_DEVICE Open take(RecordKind kind, uint64_t payload) {
        constexpr uint32_t kNumber = static_cast<uint32_t>(kEvent);
        Open open;
        open.has_room =
            take_place<kNumber % 32>(static_cast<uint32_t>(event_mask_ >> kNumber / 32 * 32), next_, limit_);
        open.stop = next_;
        open.word = record_word(kind, kNumber, payload);
        open.payload_high = static_cast<uint32_t>(payload >> kPayloadLowBits);
        return open;
    }

    TK_DEVICE static void store(const Open& open, uint32_t end) {
        constexpr int kOffset = -static_cast<int>(sizeof(SpanRecord));
        put_if<kOffset>(open.has_room, open.stop, SpanRecord{end, open.payload_high, open.begin, open.word});
    }
    template <auto kEvent>
    TK_DEVICE static Open open_at(Open open, uint64_t ticks) {
        open.begin = low_units(ticks);
        if constexpr (is_stored_first<kEvent>) store(open, open.begin - 1);
        return open;
    }
    template <auto kEvent>
    TK_DEVICE static uint64_t finish(Open open, uint64_t ticks, uint64_t payload) {
        constexpr uint32_t kEndBits = total_field_bits(event_info<kEvent>.end_fields);
        if constexpr (kEndBits != 0) {
            payload <<= kPayloadBits - kEndBits;
            open.payload_high |= static_cast<uint32_t>(payload >> kPayloadLowBits);
            open.word |= (static_cast<uint32_t>(payload) & kPayloadLowMask) << (kKindBits + kEventBits);
        }
        if constexpr (is_stored_first<kEvent>) {
            constexpr int kOffset = -static_cast<int>(sizeof(SpanRecord));
            put_if<kOffset>(open.has_room, open.stop, Vector8{low_units(ticks), open.payload_high});
        } else {
            store(open, low_units(ticks));
        }
        return ticks;
    }

    // Few instructions and no branch: all warps of a kernel begin with them, one after the other on their scheduler.
    TK_DEVICE void start(const detail::Track& track, const Warp& warp, uint32_t sm, uint32_t role) {
        const bool is_writer = track.state && warp.is_leader();
        header_ = track.header;
        detail::store_quarter(header_, 0, is_writer, read_clock(), sm, kStarted | role << 16 | track.generation);
        detail::count_start(header_, is_writer);
        state_ = is_writer ? track.state : 0;
        event_mask_ = is_writer ? track.event_mask : 0;
        next_ = reinterpret_cast<SpanRecord*>(track.records);
        // Low words of times cannot tell what an earlier launch left in a region: there, this body only counts.
        limit_ = limit_places(next_, track.generation == 0 ? track.num_records : 0);
        first_ = next_;
    }

    const uint32_t epoch_;  // on record at the end: it often comes from memory, and no track waits for it at its start
    // All that follows is the leader's; of the other lanes mask and state are 0.
    uint32_t state_ = 0;  // of detail::Track
    uint32_t limit_ = 0;  // of take_place()
    TrackHeader* header_ = nullptr;
    SpanRecord* first_ = nullptr;
    SpanRecord* next_ = nullptr;
    uint64_t event_mask_ = 0;
};

}  // namespace tracekern
