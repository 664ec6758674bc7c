// The recorders that store two records a span, its begin and its end: of a flight recorder, and of the core's cycles.
//
// RecordFormat::ring reserves nothing: it overwrites the oldest record. RecordFormat::cycles stamps records with the
// core's cycle counter, for spans shorter than a tick of the realtime clock; that one is read at both ends of the track
// only, and what lies in between gives the rate. It keeps the first records; a begin reserves the room of its end.
#pragma once

#include <type_traits>

#include "trace/writer.h"

namespace tracekern {

namespace detail {

// Both clocks of a track of cycles at one moment.
struct Anchor {
    uint64_t ticks = 0;
    uint64_t cycles = 0;
    bool sharp = false;
};

TK_DEVICE Anchor read_anchor() {
    Anchor anchor;
#if TK_GPU
    #pragma unroll 1
#endif
    for (uint32_t attempt = 0; attempt < kAnchorTries && !anchor.sharp; ++attempt) {
        const uint64_t before = read_cycles();
        anchor.ticks = read_clock();
        const uint64_t width = read_cycles() - before;
        anchor.cycles = before + width / 2;
        anchor.sharp = width <= kMaxAnchorCycles;
    }
    return anchor;
}

}  // namespace detail

// A begin that is on record, if `is_stored`.
struct OpenPair {
    uint32_t event = 0;
    bool is_stored = false;
};

template <RecordFormat kPairFormat, uint32_t kMostLevel>
class Recorder<true, kPairFormat, kMostLevel> {
public:
    static constexpr bool kTraced = true;
    static constexpr RecordFormat kFormat = kPairFormat;
    static constexpr uint32_t kLevel = kMostLevel;
    static constexpr bool kIsWhole = false;
    using Open = OpenPair;
    static constexpr bool kIsRing = kFormat == RecordFormat::ring;
    static constexpr bool kIsCycles = kFormat == RecordFormat::cycles;
    struct Args {
        using Rec = Recorder;
        LaunchDescriptor launch;

        static Args of(const LaunchDescriptor& launch) { return {launch}; }
    };

    // As the recorder of spans.
    TK_DEVICE Recorder(const Args& args, const Warp& warp, uint32_t role = 0, uint32_t epoch = 0) : epoch_(epoch) {
        detail::find_and_start(
            args.launch, warp, role, [&](const detail::Track& track, uint32_t sm) { start(track, warp, sm, role); });
    }
    Recorder(const Recorder&) = delete;
    TK_DEVICE void set_epoch(uint32_t epoch) { epoch_ = epoch; }

    TK_DEVICE ~Recorder() {
        if (state_ == 0) return;
        uint64_t ticks, cycles = 0;
        if constexpr (kIsCycles) {
            const detail::Anchor end = detail::read_anchor();
            ticks = end.ticks;
            if (start_.sharp && end.sharp) cycles = end.cycles - start_.cycles;
        } else {
            ticks = read_clock();
        }
        if constexpr (kIsRing) {
            detail::store_quarter(header_, 1, true, ticks, state_, written_);
            const bool is_same_launch = found_ != 0 && (found_ | kStartedAgain) == (state_ | kStartedAgain);
            if (is_same_launch) store_relaxed_system(&header_->starts, state_ | kStartedAgain);
        } else {
            detail::store_quarter(header_, 1, true, ticks, num_appended(first_, next_), attempted_);
        }
        detail::store_quarter(header_, 2, kIsCycles || state_ & detail::kTellsEpoch, cycles, epoch_, 0);
    }

    template <auto kEvent, class... Values>
    TK_DEVICE Open begin(Values... values) {
        const Open open{static_cast<uint32_t>(kEvent), reserve(kEvent, kSpanRoom)};
        write(open.is_stored, RecordKind::begin, open.event, now(), detail::pack_fields<kEvent, false>(values...));
        return open;
    }

    // Both return the ticks of the end.
    template <auto kEvent, class... Values>
    TK_DEVICE uint64_t end(const Open& open, Values... values) {
        const uint64_t payload = detail::pack_fields<kEvent, true>(values...);
        const uint64_t ticks = sizeof...(Values) == 0 ? now() : now_after(payload);
        write(open.is_stored, RecordKind::end, open.event, ticks, payload);
        return ticks;
    }
    template <auto kEvent, class... Values>
    TK_DEVICE uint64_t end_after(const Open& open, uint64_t value, Values... values) {
        const uint64_t ticks = now_after(value);
        write(open.is_stored, RecordKind::end, open.event, ticks, detail::pack_fields<kEvent, true>(values...));
        return ticks;
    }
    template <class AnyWarp>
    TK_DEVICE uint32_t block_sync(AnyWarp& warp) {
        return warp.block_sync_count();
    }

    // Gives back the room of an end that will never come.
    template <auto kEvent>
    TK_DEVICE void leave_open(const Open& open) {
        if (kIsRing || !open.is_stored) return;
        --attempted_;
        ++free_;
    }

    // As the recorder of spans.
    TK_DEVICE Open unrecorded() const { return {}; }
    template <auto kEvent, class... Values>
    TK_DEVICE void mark(Values... values) {
        const bool has_room = reserve(kEvent, 1);
        const uint32_t event = static_cast<uint32_t>(kEvent);
        write(has_room, RecordKind::mark, event, now(), detail::pack_fields<kEvent, false>(values...));
    }

    // For Sequence, which begins a span at the ticks that end the one before.
    TK_DEVICE uint64_t now() const {
        if constexpr (kIsCycles) return read_cycles() - start_.cycles;
        return read_clock();
    }
    template <auto kEvent, class... Values>
    TK_DEVICE Open begin_at(uint64_t ticks, Values... values) {
        const Open open{static_cast<uint32_t>(kEvent), reserve(kEvent, kSpanRoom)};
        write(open.is_stored, RecordKind::begin, open.event, ticks, detail::pack_fields<kEvent, false>(values...));
        return open;
    }
    TK_DEVICE void end_at(const Open& open, uint64_t ticks) {
        write(open.is_stored, RecordKind::end, open.event, ticks, 0);
    }

private:
    static constexpr uint32_t kSpanRoom = 2;  // its begin and its end
    static constexpr uint32_t kStartedAs = kIsRing ? kStartedRing : kStartedCycles;

    // Not before `value` is there.
    TK_DEVICE uint64_t now_after(uint64_t value) const {
        if constexpr (kIsCycles) return read_cycles_after(value) - start_.cycles;
        return read_clock_after(value);
    }

    // Few instructions and no branch: all warps of a kernel begin with them, one after the other on their scheduler.
    TK_DEVICE void start(const detail::Track& track, const Warp& warp, uint32_t sm, uint32_t role) {
        const bool is_writer = track.state && warp.is_leader();
        uint64_t ticks;
        if constexpr (kIsCycles) {
            start_ = detail::read_anchor();
            ticks = start_.ticks;
        } else {
            ticks = read_clock();
        }
        header_ = track.header;
        detail::store_quarter(header_, 0, is_writer, ticks, sm, kStartedAs | role << 16 | track.generation);
        state_ = is_writer ? track.state : 0;
        next_ = track.records;
        event_mask_ = is_writer ? track.event_mask : 0;
        if constexpr (kIsRing) {
            state_ |= is_writer ? track.generation : 0;
            if (is_writer) found_ = exchange_relaxed_device(&header_->starts, kStartedOnce | track.generation);
            if (track.num_records == 0) event_mask_ = 0;
            ring_bits_ = 31 - static_cast<uint32_t>(__builtin_clz(track.num_records | 1));
            ring_mask_ = (1u << ring_bits_) - 1;
        } else {
            count_if(is_writer, &header_->starts);
            first_ = next_;
            free_ = append_room(next_, track.num_records);
        }
    }

    template <class Event>
    TK_DEVICE bool reserve(Event event, uint32_t room) {
        const uint32_t bit = static_cast<uint32_t>(event);  // tested in place: moved down it costs an instruction more
        const uint32_t wanted = static_cast<uint32_t>(event_mask_ >> (bit & 32)) & 1u << (bit & 31);
        if constexpr (kIsRing) {
            return wanted != 0;
        } else {
            return take_if(wanted, room, free_, attempted_);
        }
    }

    TK_DEVICE void write(bool enabled, RecordKind kind, uint32_t event, uint64_t ticks, uint64_t payload) {
        const uint32_t word = record_word(kind, event, payload);
        const uint32_t payload_high = static_cast<uint32_t>(payload >> kPayloadLowBits);
        if constexpr (kIsRing) {
            const uint32_t slot = written_ & ring_mask_;
            const uint64_t lap = written_ >> ring_bits_;
            const uint64_t low_ticks = ticks & ((uint64_t{1} << kLapShift) - 1);
            store_if(enabled, next_ + slot, written_, WideRecord{lap << kLapShift | low_ticks, payload_high, word});
        } else {
            append_if(enabled, next_, WideRecord{ticks, payload_high, word});
        }
    }

    uint32_t epoch_;  // on record at the end: it often comes from memory, and no track waits for it at its start
    [[no_unique_address]] std::conditional_t<kIsCycles, detail::Anchor, std::true_type> start_;
    // All that follows is the leader's; of the other lanes mask and state are 0.
    uint32_t state_ = 0;  // of detail::Track; of a ring with its generation
    TrackHeader* header_ = nullptr;
    WideRecord* next_ = nullptr;  // of a ring: its first slot
    uint64_t event_mask_ = 0;
    // Of tracks that keep their first records.
    WideRecord* first_ = nullptr;
    uint32_t free_ = 0;  // records that are neither written nor reserved
    uint32_t attempted_ = 0;
    // Of a ring.
    uint32_t found_ = 0;  // in TrackHeader::starts
    uint32_t written_ = 0;
    uint32_t ring_bits_ = 0;  // it has 2^ring_bits_ slots
    uint32_t ring_mask_ = 0;
};

}  // namespace tracekern
