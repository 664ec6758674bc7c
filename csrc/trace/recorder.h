// How a kernel writes its records. Tracing is a type: Recorder<false> costs nothing, see tests/test_zero_cost.py.
//
//   template <class Rec>
//   TK_DEVICE void my_kernel(Warp& warp, const MyArgs& args, typename Rec::Args trace) {
//       Rec recorder(trace, warp);
//       {
//           TK_WAIT(recorder, MyEvent::wait_token, peer, slot);
//           const uint32_t seen = wait(...);
//           TK_END(seen);
//       }
//   }
//
// One writer owns a track: no atomic, no fence, no warp synchronisation on the write path, so recording is legal in
// divergent code of the leader lane. A begin reserves the room of its end, so whatever begins can end; what finds no
// room is counted. RecordFormat::ring reserves nothing: it overwrites the oldest record, for a flight recorder.
// RecordFormat::cycles stamps records with the core's cycle counter, for spans shorter than a tick of the realtime
// clock; that one is read at both ends of the track only, and what lies in between gives the rate.
//
// All lanes run the same instructions, only the leader's stores are enabled: a branch would cost more than they do.
#pragma once

#include "platform/device.h"
#include "trace/events.h"
#include "trace/record.h"
#include "trace/track.h"

namespace tracekern {

namespace detail {

// Packs values into the fields of a table entry, first field lowest; a value wider than its field loses its high bits.
template <auto kEvent, bool kEnd, class... Values>
TK_DEVICE uint64_t pack_fields(Values... values) {
    constexpr const char* kFields =
        kEnd ? EventTable<decltype(kEvent)>::kEvents[static_cast<uint32_t>(kEvent)].end_fields
             : EventTable<decltype(kEvent)>::kEvents[static_cast<uint32_t>(kEvent)].begin_fields;
    static_assert(sizeof...(Values) == 0 || sizeof...(Values) == count_fields(kFields),
                  "one value for each field of the event's table entry");
    if constexpr (sizeof...(Values) == 0) {
        return 0;
    } else {
        constexpr auto kWidths = field_widths<sizeof...(Values)>(kFields);
        uint64_t payload = 0;
        uint32_t shift = 0, index = 0;
        ((payload |= (static_cast<uint64_t>(values) & ((uint64_t{1} << kWidths.bits[index]) - 1)) << shift,
          shift += kWidths.bits[index++]),
         ...);
        return payload;
    }
}

// A span that is closed by hand says all that the table promises of its end.
template <auto kEvent, class... Values>
TK_DEVICE constexpr void check_end_fields() {
    static_assert(sizeof...(Values) ==
                      count_fields(EventTable<decltype(kEvent)>::kEvents[static_cast<uint32_t>(kEvent)].end_fields),
                  "TK_END and TK_END_IF take one value for each field at the event's end");
}

// kEvent, checked to be of that class as a part of a declaration.
template <auto kEvent, EventClass kClass>
struct EventOf {
    static_assert(EventTable<decltype(kEvent)>::kEvents[static_cast<uint32_t>(kEvent)].event_class == kClass,
                  "TK_WAIT is for events of class wait, TK_SIGNAL for those of class signal");
    static constexpr auto kChecked = kEvent;
};

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

template <bool kTrace, RecordFormat kFormat = RecordFormat::wide>
class Recorder;

// An open span; closes at the end of its scope unless it was closed before.
template <class Rec, auto kEvent>
class Span {
public:
    static constexpr bool kTraced = true;
    TK_DEVICE Span(Rec& recorder, bool open) : recorder_(recorder), open_(open) {}
    Span(const Span&) = delete;
    TK_DEVICE ~Span() { close_with(); }

    // Closes the span, not before `values` are there.
    template <class... Values>
    TK_DEVICE void close(Values... values) {
        detail::check_end_fields<kEvent, Values...>();
        close_with(values...);
    }
    // The same if `done`; else the span stays open for good: what it waited for never came.
    template <class... Values>
    TK_DEVICE void close_if(bool done, Values... values) {
        detail::check_end_fields<kEvent, Values...>();
        if constexpr (sizeof...(Values) == 0) {
            if (done) return close_after(done);
        } else {
            if (done) return close_with(values...);
        }
        if (!closed_) recorder_.leave_open(open_);
        closed_ = true;
    }
    // Closes the span without end fields, not before `value` is there.
    template <class Value>
    TK_DEVICE void close_after(Value value) {
        if (!closed_) recorder_.template end_after<kEvent>(open_, static_cast<uint64_t>(value));
        closed_ = true;
    }
    // All warps of the block call it: a block barrier, and the span ends when the last warp has arrived.
    template <class AnyWarp>
    TK_DEVICE void close_after_barrier(AnyWarp&& warp) {
        close_after(recorder_.block_sync(warp));
    }

private:
    template <class... Values>
    TK_DEVICE void close_with(Values... values) {
        if (!closed_) recorder_.template end<kEvent>(open_, values...);
        closed_ = true;
    }

    Rec& recorder_;
    const bool open_;
    bool closed_ = false;  // the compiler knows it wherever a span is closed on every way
};

// Untraced: nothing, not even a branch that the compiler would have to fold.
template <auto kEvent>
class Span<Recorder<false>, kEvent> {
public:
    static constexpr bool kTraced = false;
    TK_DEVICE Span(Recorder<false>&, bool) {}
    Span(const Span&) = delete;
    template <class... Values>
    TK_DEVICE void close(Values...) {
        detail::check_end_fields<kEvent, Values...>();
    }
    template <class... Values>
    TK_DEVICE void close_if(bool, Values...) {
        detail::check_end_fields<kEvent, Values...>();
    }
    TK_DEVICE void close_after(uint64_t) {}
    template <class AnyWarp>
    TK_DEVICE void close_after_barrier(AnyWarp&& warp) {
        warp.block_sync();
    }
};

// Spans one after the other on one track: one clock read ends one and begins the next. Closes the last one with its
// scope.
template <class Rec>
class Sequence {
public:
    static constexpr bool kTraced = Rec::kTraced;
    TK_DEVICE explicit Sequence(Rec& recorder) : recorder_(recorder) {}
    Sequence(const Sequence&) = delete;
    TK_DEVICE ~Sequence() { recorder_.end_sequence(event_, open_); }

    template <auto kEvent, class... Values>
    TK_DEVICE void next(Values... values) {
        open_ = recorder_.template next<kEvent>(event_, open_, values...);
        event_ = static_cast<uint32_t>(kEvent);
    }

private:
    Rec& recorder_;
    uint32_t event_ = 0;
    bool open_ = false;
};

template <>
class Recorder<false> {
public:
    static constexpr bool kTraced = false;
    struct Args {
        using Rec = Recorder;
    };
    TK_DEVICE Recorder(Args, const Warp&, uint32_t = 0, uint32_t = 0) {}
    Recorder(const Recorder&) = delete;
    template <auto kEvent, class... Values>
    TK_DEVICE bool begin(Values...) {
        return false;
    }
    template <auto kEvent, class... Values>
    TK_DEVICE void mark(Values...) {}
    template <auto kEvent, class... Values>
    TK_DEVICE bool next(uint32_t, bool, Values...) {
        return false;
    }
    TK_DEVICE void end_sequence(uint32_t, bool) {}
};

template <RecordFormat kFormat>
class Recorder<true, kFormat> {
public:
    static constexpr bool kTraced = true;
    static constexpr bool kIsRing = kFormat == RecordFormat::ring;
    static constexpr bool kIsCycles = kFormat == RecordFormat::cycles;
    struct Args {
        using Rec = Recorder;
        LaunchDescriptor launch;
    };

    // `role` names the track; one that the descriptor does not select records nothing, one beyond the 32 that there can
    // be is selected by its last 5 bits: a reader tells of it. `epoch` is asked for in a graph; elsewhere
    // capture.launch() stated.
    TK_DEVICE Recorder(const Args& args, const Warp& warp, uint32_t role = 0, uint32_t epoch = 0) : epoch_(epoch) {
        const uint32_t sm = sm_id();  // asked for first: it takes longest
        const LaunchDescriptor& launch = args.launch;
        const bool is_selected = detail::is_selected(launch, warp.block, role);
        const uint32_t index = warp.block - launch.block_first;
        if (is_selected & (launch.block_step == 1) & (warp.warp < launch.warps_per_block)) {
            start(detail::track_at(launch, launch.region, index, warp.warp), warp, sm, role);
        } else if (is_selected & (launch.block_step == (1 | kInGraph)) & (warp.warp < launch.warps_per_block)) {
            start(detail::track_of_replay(launch, index, warp.warp), warp, sm, role);
        } else if (is_selected | (warp.block == launch.num_blocks)) {
            const detail::Track track = detail::find_track(
                launch, role, warp.block, warp.num_blocks, warp.warp, warp.num_warps, warp.is_leader());
            start(track, warp, sm, role);
        }
    }
    Recorder(const Recorder&) = delete;

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
            store_quarter(1, true, ticks, written_, written_);
        } else {
            store_quarter(1, true, ticks, num_appended(first_, next_), attempted_);
        }
        store_quarter(2, kIsCycles || state_ & detail::kTellsEpoch, cycles, epoch_, 0);
    }

    // True when the span was recorded; pass that to end().
    template <auto kEvent, class... Values>
    TK_DEVICE bool begin(Values... values) {
        const bool open = reserve(kEvent, kSpanRoom);
        write(open, RecordKind::begin, kEvent, stamp(), detail::pack_fields<kEvent, false>(values...));
        return open;
    }

    template <auto kEvent, class... Values>
    TK_DEVICE void end(bool open, Values... values) {
        const uint64_t payload = detail::pack_fields<kEvent, true>(values...);
        const uint64_t ticks = sizeof...(Values) == 0 ? stamp() : stamp_after(payload);
        write(open, RecordKind::end, kEvent, ticks, payload);
    }
    template <auto kEvent>
    TK_DEVICE void end_after(bool open, uint64_t value) {
        const uint64_t ticks = stamp_after(value);
        write(open, RecordKind::end, kEvent, ticks, 0);
    }
    // A block barrier whose result is there when the last warp has arrived, so that a clock read can wait for it.
    TK_DEVICE uint32_t block_sync(Warp& warp) { return warp.block_sync_count(); }

    // Gives back the room of an end that will never come.
    TK_DEVICE void leave_open(bool open) {
        if (kIsRing || !open) return;
        --attempted_;
        ++free_;
    }

    template <auto kEvent, class... Values>
    TK_DEVICE void mark(Values... values) {
        const bool open = reserve(kEvent, 1);
        write(open, RecordKind::mark, kEvent, stamp(), detail::pack_fields<kEvent, false>(values...));
    }

    // For Sequence: ends `event` if it is open and begins kEvent at the same tick.
    template <auto kEvent, class... Values>
    TK_DEVICE bool next(uint32_t event, bool open, Values... values) {
        const uint64_t ticks = stamp();
        write(open, RecordKind::end, event, ticks, 0);
        const bool next_open = reserve(kEvent, kSpanRoom);
        write(next_open, RecordKind::begin, kEvent, ticks, detail::pack_fields<kEvent, false>(values...));
        return next_open;
    }
    TK_DEVICE void end_sequence(uint32_t event, bool open) { write(open, RecordKind::end, event, stamp(), 0); }

private:
    static constexpr uint32_t kSpanRoom = 2;  // its begin and its end
    static constexpr uint32_t kStartedAs = kIsRing ? kStartedRing : kIsCycles ? kStartedCycles : kStarted;

    // The time of a record; stamp_after: not before `value` is there.
    TK_DEVICE uint64_t stamp() const {
        if constexpr (kIsCycles) return read_cycles() - start_.cycles;
        return read_clock();
    }
    TK_DEVICE uint64_t stamp_after(uint64_t value) const {
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
        store_quarter(0, is_writer, ticks, sm, kStartedAs | role << 16 | track.generation);
        state_ = is_writer ? track.state : 0;
        next_ = track.records;
        event_mask_ = is_writer ? track.event_mask : 0;
        if constexpr (kIsRing) {
            if (track.num_records == 0) event_mask_ = 0;
            ring_bits_ = 31 - static_cast<uint32_t>(__builtin_clz(track.num_records | 1));
            ring_mask_ = (1u << ring_bits_) - 1;
        } else {
            first_ = next_;
            free_ = append_room(next_, track.num_records);
        }
    }

    // 16 bytes of the header.
    TK_DEVICE void store_quarter(uint32_t quarter, bool enabled, uint64_t first, uint32_t second, uint32_t third) {
        uint32_t count = 0;
        const Vector16 value{static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32), second, third};
        store_if(enabled, reinterpret_cast<Vector16*>(header_) + quarter, count, value);
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

    template <class Event>
    TK_DEVICE void write(bool open, RecordKind kind, Event event, uint64_t ticks, uint64_t payload) {
        const uint32_t word = record_word(kind, static_cast<uint32_t>(event), payload);
        const uint32_t payload_high = static_cast<uint32_t>(payload >> kPayloadLowBits);
        if constexpr (kIsRing) {
            const uint32_t slot = written_ & ring_mask_;
            const uint64_t lap = written_ >> ring_bits_;
            const uint64_t low_ticks = ticks & ((uint64_t{1} << kLapShift) - 1);
            store_if(open, next_ + slot, written_, WideRecord{lap << kLapShift | low_ticks, payload_high, word});
        } else {
            append_if(open, next_, WideRecord{ticks, payload_high, word});
        }
    }

    const uint32_t epoch_;  // on record at the end: it often comes from memory, and no track waits for it at its start
    [[no_unique_address]] std::conditional_t<kIsCycles, detail::Anchor, std::true_type> start_;
    // All that follows is the leader's; of the other lanes mask and state are 0.
    uint32_t state_ = 0;  // of detail::Track
    TrackHeader* header_ = nullptr;
    WideRecord* next_ = nullptr;  // of a ring: its first slot
    uint64_t event_mask_ = 0;
    // Of tracks that keep their first records.
    WideRecord* first_ = nullptr;
    uint32_t free_ = 0;  // records that are neither written nor reserved
    uint32_t attempted_ = 0;
    // Of a ring.
    uint32_t written_ = 0;
    uint32_t ring_bits_ = 0;  // it has 2^ring_bits_ slots
    uint32_t ring_mask_ = 0;
};

}  // namespace tracekern

// Declares `recorder` for the warp that runs this, in a plain CUDA kernel that got `trace`, a Rec::Args. What may
// follow: the warp's role and the call's epoch, as Recorder takes them.
#define TK_RECORDER(trace, ...)                                  \
    typename std::remove_cvref_t<decltype(trace)>::Rec recorder( \
        trace, ::tracekern::current_warp() __VA_OPT__(, ) __VA_ARGS__)

// One-line spellings. A scope holds one span; nest scopes for nested spans. Untraced, no value is evaluated.
#define TK_IF_TRACED_(what, ...) \
    (std::remove_reference_t<decltype(what)>::kTraced ? __VA_ARGS__ : decltype(__VA_ARGS__)())
#define TK_RANGE(recorder, event, ...)                                                              \
    [[maybe_unused]] ::tracekern::Span<std::remove_reference_t<decltype(recorder)>, event> tk_span( \
        recorder, TK_IF_TRACED_(recorder, (recorder).template begin<event>(__VA_ARGS__)))
#define TK_WAIT(recorder, event, ...) \
    TK_RANGE(recorder, (::tracekern::detail::EventOf<event, ::tracekern::EventClass::wait>::kChecked), __VA_ARGS__)
// Opens before the release fence (where stores drain) and closes after the flag's store.
#define TK_SIGNAL(recorder, event, ...) \
    TK_RANGE(recorder, (::tracekern::detail::EventOf<event, ::tracekern::EventClass::signal>::kChecked), __VA_ARGS__)
// Closes the scope's span now, with its end fields; TK_END_IF(false) leaves it open for good.
#define TK_END(...)    TK_IF_TRACED_(tk_span, tk_span.close(__VA_ARGS__))
#define TK_END_IF(...) TK_IF_TRACED_(tk_span, tk_span.close_if(__VA_ARGS__))
// Closes it without end fields, but not before `value` is there: a clock read waits for nothing it does not depend on.
#define TK_END_AFTER(value) TK_IF_TRACED_(tk_span, tk_span.close_after(value))
// A block barrier that ends the scope's span. Behind a plain warp.block_sync() the span would end when this warp
// arrives.
#define TK_END_AFTER_BARRIER(warp) tk_span.close_after_barrier(warp)
// TK_SEQUENCE opens a chain in this scope, each TK_NEXT ends its last span and begins one with the same clock read.
#define TK_SEQUENCE(recorder)         ::tracekern::Sequence<std::remove_reference_t<decltype(recorder)>> tk_sequence(recorder)
#define TK_NEXT(event, ...)           TK_IF_TRACED_(tk_sequence, tk_sequence.template next<event>(__VA_ARGS__))
#define TK_MARK(recorder, event, ...) TK_IF_TRACED_(recorder, (recorder).template mark<event>(__VA_ARGS__))
