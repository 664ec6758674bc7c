// How a kernel writes its records. Tracing is a type: Recorder<false> costs nothing, see tests/moe/test_zero_cost.py.
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
// divergent code of the leader lane. Whether there was but one, TrackHeader::starts tells: the constructor's one
// atomic. What begins can end; what finds no room is counted. All lanes run the same instructions, only the leader's
// stores are enabled: a branch would cost more than they do.
#pragma once

#include "trace/pair_recorder.h"
#include "trace/span_recorder.h"
#include "trace/whole_recorder.h"

namespace tracekern {

template <class Rec>
class Sequence;

namespace detail {

// Whether this recorder records the event.
template <class Rec, auto kEvent>
inline constexpr bool is_recorded = Rec::kTraced && event_info<kEvent>.level <= Rec::kLevel;

template <class Rec>
inline constexpr bool is_sequence = false;
template <class Rec>
inline constexpr bool is_sequence<Sequence<Rec>> = Rec::kTraced;

// A span that is closed by hand says all that the table promises of its end.
template <auto kEvent, class... Values>
TK_DEVICE constexpr void check_end_fields() {
    static_assert(sizeof...(Values) == count_fields(event_info<kEvent>.end_fields),
                  "TK_END, TK_END_IF and TK_END_AFTER take one value for each field at the event's end");
}

// A span that there is if it was wanted: what ends it is skipped where not.
template <class Open>
struct OpenIf {
    Open open;
    bool wanted;
};

template <auto kEvent, class Rec, class... Values>
TK_DEVICE OpenIf<typename Rec::Open> begin_if(Rec& recorder, bool wanted, Values... values) {
    if (!wanted) return {recorder.unrecorded(), false};
    return {recorder.template begin<kEvent>(values...), true};
}
template <auto kEvent, class Rec, class... Values>
TK_DEVICE typename Rec::Open begin_since(Rec& recorder, uint64_t since, Values... values) {
    if constexpr (Rec::kTraced) {
        return recorder.template begin_at<kEvent>(since, values...);
    } else {
        return recorder.unrecorded();
    }
}

// kEvent, checked to be of that class as a part of a declaration.
template <auto kEvent, EventClass kClass>
struct EventOf {
    static_assert(event_info<kEvent>.event_class == kClass,
                  "TK_WAIT is for events of class wait, TK_SIGNAL for those of class signal");
    static constexpr auto kChecked = kEvent;
};

}  // namespace detail

template <>
class Recorder<false> {
public:
    static constexpr bool kTraced = false;
    static constexpr uint32_t kLevel = 0;
    struct Open {};
    struct Args {
        using Rec = Recorder;
    };
    // Of any recorder's arguments: a warp of a traced kernel may be left out.
    template <class AnyArgs = Args>
    TK_DEVICE Recorder(const AnyArgs&, const Warp&, uint32_t = 0, uint32_t = 0) {}
    Recorder(const Recorder&) = delete;
    TK_DEVICE void set_epoch(uint32_t) {}
    template <auto kEvent, class... Values>
    TK_DEVICE Open begin(Values...) {
        detail::check_begin_fields<kEvent, Values...>();
        return {};
    }
    TK_DEVICE Open unrecorded() { return {}; }
    TK_DEVICE uint64_t now() const { return 0; }
    template <auto kEvent, class... Values>
    TK_DEVICE void mark(Values...) {
        detail::check_begin_fields<kEvent, Values...>();
    }
};

// An open span; closes at the end of its scope unless it was closed before.
template <class Rec, auto kEvent, bool kIsRecorded = detail::is_recorded<Rec, kEvent>>
class Span {
public:
    static constexpr bool kTraced = true;
    TK_DEVICE Span(Rec& recorder, const typename Rec::Open& open) : recorder_(recorder), open_(open) {}
    // A sequence goes on behind a span that was not wanted, too.
    TK_DEVICE Span(Rec& recorder, const detail::OpenIf<typename Rec::Open>& begun)
        : recorder_(recorder), open_(begun.open), closed_(!begun.wanted && !detail::is_sequence<Rec>) {}
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
        if (!closed_) recorder_.template leave_open<kEvent>(open_);
        closed_ = true;
    }
    // Closes the span, not before `value` is there.
    template <class Value, class... Values>
    TK_DEVICE void close_after(Value value, Values... values) {
        detail::check_end_fields<kEvent, Values...>();
        if (!closed_) recorder_.template end_after<kEvent>(open_, static_cast<uint64_t>(value), values...);
        closed_ = true;
    }
    // All warps of the block, or of a group, call it: their barrier, and the span ends when the last one has arrived.
    template <class AnyWarp>
    TK_DEVICE void close_after_barrier(AnyWarp&& warp) {
        const uint32_t arrived = recorder_.block_sync(warp);
        if (!closed_) close_after(arrived);
    }

private:
    template <class... Values>
    TK_DEVICE void close_with(Values... values) {
        if (!closed_) recorder_.template end<kEvent>(open_, values...);
        closed_ = true;
    }

    Rec& recorder_;
    const typename Rec::Open open_;
    bool closed_ = false;  // the compiler knows it wherever a span is wanted, and closed on every way
};

// Untraced: nothing, not even a branch that the compiler would have to fold.
template <class Rec, auto kEvent>
class Span<Rec, kEvent, false> {
public:
    static constexpr bool kTraced = false;
    template <class Begun>
    TK_DEVICE Span([[maybe_unused]] Rec& recorder, Begun) {
        if constexpr (detail::is_sequence<Rec>) recorder.unrecorded();
    }
    Span(const Span&) = delete;
    template <class... Values>
    TK_DEVICE void close(Values...) {
        detail::check_end_fields<kEvent, Values...>();
    }
    template <class... Values>
    TK_DEVICE void close_if(bool, Values...) {
        detail::check_end_fields<kEvent, Values...>();
    }
    template <class Value, class... Values>
    TK_DEVICE void close_after(Value, Values...) {
        detail::check_end_fields<kEvent, Values...>();
    }
    template <class AnyWarp>
    TK_DEVICE void close_after_barrier(AnyWarp&& warp) {
        warp.block_sync();
    }
};

// Spans one after the other on one track: one clock read ends one and begins the next. TK_NEXT begins a span that ends
// where the next one begins, the last one with the scope of the sequence. The Span of a scope takes the sequence in
// place of a recorder: it ends with fields, after a value or a barrier, and the next one begins at that tick.
template <class Rec>
class Sequence {
public:
    static constexpr bool kTraced = true;
    static constexpr uint32_t kLevel = Rec::kLevel;
    using Open = typename Rec::Open;
    TK_DEVICE explicit Sequence(Rec& recorder) : recorder_(recorder) {}
    Sequence(const Sequence&) = delete;
    TK_DEVICE ~Sequence() {
        if (!has_ended_) recorder_.end_at(last_, recorder_.now());
    }

    template <auto kEvent, class... Values>
    TK_DEVICE void next(Values... values) {
        if constexpr (detail::is_recorded<Rec, kEvent>) {
            last_ = begin<kEvent>(values...);
        } else {
            end_last();
            has_ended_ = false;  // the next one begins where this one ends
        }
    }

    template <auto kEvent, class... Values>
    TK_DEVICE Open begin(Values... values) {
        const uint64_t ticks = end_last();
        has_ended_ = false;
        return recorder_.template begin_at<kEvent>(ticks, values...);
    }
    TK_DEVICE Open unrecorded() {
        end_last();
        return recorder_.unrecorded();
    }
    template <auto kEvent, class... Values>
    TK_DEVICE void end(const Open& open, Values... values) {
        note_end(recorder_.template end<kEvent>(open, values...));
    }
    template <auto kEvent, class... Values>
    TK_DEVICE void end_after(const Open& open, uint64_t value, Values... values) {
        note_end(recorder_.template end_after<kEvent>(open, value, values...));
    }
    template <auto kEvent>
    TK_DEVICE void leave_open(const Open& open) {
        recorder_.template leave_open<kEvent>(open);
    }
    template <class AnyWarp>
    TK_DEVICE uint32_t block_sync(AnyWarp& warp) {
        return recorder_.block_sync(warp);
    }

private:
    // Where the next span begins.
    TK_DEVICE uint64_t end_last() {
        if (!has_ended_) {
            const uint64_t ticks = recorder_.now();
            recorder_.end_at(last_, ticks);
            last_ = {};
            note_end(ticks);
        }
        return ended_ticks_;
    }
    TK_DEVICE void note_end(uint64_t ticks) {
        ended_ticks_ = ticks;
        has_ended_ = true;
    }

    Rec& recorder_;
    Open last_{};  // of TK_NEXT; what was never begun has no room
    bool has_ended_ = false;
    uint64_t ended_ticks_ = 0;
};

template <>
class Sequence<Recorder<false>> {
public:
    static constexpr bool kTraced = false;
    static constexpr uint32_t kLevel = 0;
    using Open = Recorder<false>::Open;
    TK_DEVICE explicit Sequence(Recorder<false>&) {}
    Sequence(const Sequence&) = delete;
    template <auto kEvent, class... Values>
    TK_DEVICE void next(Values...) {
        detail::check_begin_fields<kEvent, Values...>();
    }
    template <auto kEvent, class... Values>
    TK_DEVICE Open begin(Values...) {
        detail::check_begin_fields<kEvent, Values...>();
        return {};
    }
    TK_DEVICE Open unrecorded() { return {}; }
};

}  // namespace tracekern

// Declares `recorder` for the warp that runs this, in a plain CUDA kernel that got `trace`, a Rec::Args. What may
// follow: the warp's role and the call's epoch, as Recorder takes them.
#define TK_RECORDER(trace, ...)                                                           \
    typename std::remove_const_t<std::remove_reference_t<decltype(trace)>>::Rec recorder( \
        trace, ::tracekern::current_warp() __VA_OPT__(, ) __VA_ARGS__)

// One-line spellings. A scope holds one span; nest scopes for nested spans. Untraced, no value is evaluated.
#define TK_IF_(condition, ...)      ((condition) ? __VA_ARGS__ : decltype(__VA_ARGS__)())
#define TK_IF_TRACED_(what, ...)    TK_IF_(std::remove_reference_t<decltype(what)>::kTraced, __VA_ARGS__)
#define TK_JOIN_NOW_(first, second) first##second
#define TK_JOIN_(first, second)     TK_JOIN_NOW_(first, second)
// Two declarations of which the second needs the first: behind an `if` without braces, where the span would be over at
// once, or always there, neither is a mistake of its own.
#define TK_SPAN_AS_(Type, recorder, event, ...)                                         \
    using Type = ::tracekern::Span<std::remove_reference_t<decltype(recorder)>, event>; \
    [[maybe_unused]] Type tk_span(recorder, TK_IF_(Type::kTraced, __VA_ARGS__))
#define TK_SPAN_(...)                  TK_SPAN_AS_(TK_JOIN_(tk_span_needs_braces_in_line_, __LINE__), __VA_ARGS__)
#define TK_RANGE(recorder, event, ...) TK_SPAN_(recorder, event, (recorder).template begin<event>(__VA_ARGS__))
#define TK_EVENT_OF_(event, event_class) \
    (::tracekern::detail::EventOf<event, ::tracekern::EventClass::event_class>::kChecked)
#define TK_WAIT(recorder, event, ...) TK_RANGE(recorder, TK_EVENT_OF_(event, wait), __VA_ARGS__)
// The same if `wanted`; else there is no span in this scope, and its TK_END ends none. docs/instrumenting.md says where
// a warp that has nothing to do may leave out its wait at a barrier.
#define TK_WAIT_IF(recorder, wanted, event, ...) \
    TK_SPAN_(recorder,                           \
             TK_EVENT_OF_(event, wait),          \
             ::tracekern::detail::begin_if<event>(recorder, static_cast<bool>(wanted) __VA_OPT__(, ) __VA_ARGS__))
// A wait from the time that TK_TIME(recorder, event, name) declared as `name`, where only later it is known whether
// there was one: until then it is on no record.
#define TK_TIME(recorder, event, name)     \
    [[maybe_unused]] const uint64_t name = \
        ::tracekern::detail::is_recorded<std::remove_reference_t<decltype(recorder)>, event> ? (recorder).now() : 0
#define TK_WAIT_SINCE(recorder, since, event, ...) \
    TK_SPAN_(recorder,                             \
             TK_EVENT_OF_(event, wait),            \
             ::tracekern::detail::begin_since<event>(recorder, since __VA_OPT__(, ) __VA_ARGS__))
// Opens before the release fence (where stores drain) and closes after the flag's store.
#define TK_SIGNAL(recorder, event, ...) TK_RANGE(recorder, TK_EVENT_OF_(event, signal), __VA_ARGS__)
// Closes the scope's span now, with its end fields; TK_END_IF(false) leaves it open for good.
#define TK_END(...)    TK_IF_TRACED_(tk_span, tk_span.close(__VA_ARGS__))
#define TK_END_IF(...) TK_IF_TRACED_(tk_span, tk_span.close_if(__VA_ARGS__))
// TK_END_AFTER(value, end fields...) closes it not before `value` is there: a clock read waits for nothing it does not
// depend on.
#define TK_END_AFTER(...) TK_IF_TRACED_(tk_span, tk_span.close_after(__VA_ARGS__))
// A block barrier that ends the scope's span. Behind a plain warp.block_sync() the span would end when this warp
// arrives.
#define TK_END_AFTER_BARRIER(...) tk_span.close_after_barrier(__VA_ARGS__)
// The same of some warps of a block: bar.sync id, 32 * warps. Machines without it take two values more, see WarpGroup.
#define TK_END_AFTER_GROUP_BARRIER(...) tk_span.close_after_barrier(::tracekern::WarpGroup(__VA_ARGS__))
// The same of the grid. What follows `warp` is the barrier's own call, by all warps of the block, which meet once more
// where the span is recorded: the call may end with a plain block barrier.
#define TK_END_AFTER_GRID_BARRIER(warp, ...) \
    (static_cast<void>(__VA_ARGS__), TK_IF_TRACED_(tk_span, tk_span.close_after_barrier(warp)))
// TK_SEQUENCE opens a chain in this scope, each TK_NEXT ends its last span and begins one with the same clock read.
// Spans with an end of their own begin with TK_WAIT(tk_sequence, ...), in braces.
#define TK_SEQUENCE(recorder) ::tracekern::Sequence<std::remove_reference_t<decltype(recorder)>> tk_sequence(recorder)
#define TK_NEXT(event, ...)   TK_IF_TRACED_(tk_sequence, tk_sequence.template next<event>(__VA_ARGS__))
#define TK_MARK(recorder, event, ...)                                                              \
    TK_IF_((::tracekern::detail::is_recorded<std::remove_reference_t<decltype(recorder)>, event>), \
           (recorder).template mark<event>(__VA_ARGS__))
