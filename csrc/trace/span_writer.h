// Spans as records of 16 bytes, for recorders that keep the first records of each track.
//
// A span takes its place when it begins, so that records stand in the order of their begins, and what begins can end.
// Work, signals and waits for warps of the block are stored once, when they end. Other waits and syncs are stored when
// they begin and completed when they end: what a hung kernel was waiting for is on record.
#pragma once

#include "trace/writer.h"

namespace tracekern {

struct PlaceInTrack {
    SpanRecord* stop = nullptr;  // its end: where the track went on, so that it takes no copy
    bool is_free = false;
};

// A span that has begun: where its record goes, and what is known of it.
struct OpenSpan {
    PlaceInTrack place{};
    uint32_t begin = 0;
    uint32_t word = 0;
    uint32_t payload_high = 0;
};

// Own: take_place<kEvent>() takes the track's next place, if there is one for the event.
template <class Own>
class SpanWriter {
public:
    using Open = OpenSpan;

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
    TK_DEVICE Open unrecorded() const { return {}; }

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
    // Not a wait at a barrier of the block: the one who holds it up is on record.
    template <auto kEvent>
    static constexpr bool is_stored_first = [] {
        constexpr EventInfo kInfo = event_info<kEvent>;
        if (kInfo.event_class == EventClass::sync) return true;
        return kInfo.event_class == EventClass::wait && channel_kind(kInfo.channel) != "group";
    }();

    TK_DEVICE static uint32_t low_units(uint64_t ticks) { return static_cast<uint32_t>(ticks >> kClockShift); }

    template <auto kEvent>
    TK_DEVICE Open take(RecordKind kind, uint64_t payload) {
        Open open;
        open.place = static_cast<Own&>(*this).template take_place<kEvent>();
        open.word = record_word(kind, static_cast<uint32_t>(kEvent), payload);
        open.payload_high = static_cast<uint32_t>(payload >> kPayloadLowBits);
        return open;
    }

    // A record, or its first half.
    template <class Record>
    TK_DEVICE static void put(const Open& open, const Record& record) {
        put_if<-static_cast<int>(sizeof(SpanRecord))>(open.place.is_free, open.place.stop, record);
    }
    TK_DEVICE static void store(const Open& open, uint32_t end) {
        put(open, SpanRecord{end, open.payload_high, open.begin, open.word});
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
            put(open, Vector8{low_units(ticks), open.payload_high});
        } else {
            store(open, low_units(ticks));
        }
        return ticks;
    }
};

}  // namespace tracekern
