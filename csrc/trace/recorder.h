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
// divergent code of the leader lane. Whether there was but one, TrackHeader::starts tells: the constructor's one
// atomic. What begins can end; what finds no room is counted. All lanes run the same instructions, only the leader's
// stores are enabled: a branch would cost more than they do.
#pragma once

#include "trace/pair_recorder.h"
#include "trace/span_recorder.h"

namespace tracekern {

namespace detail {

// A span that is closed by hand says all that the table promises of its end.
template <auto kEvent, class... Values>
TK_DEVICE constexpr void check_end_fields() {
    static_assert(sizeof...(Values) == count_fields(event_info<kEvent>.end_fields),
                  "TK_END and TK_END_IF take one value for each field at the event's end");
}

template <auto kEvent, class Rec, class... Values>
TK_DEVICE typename Rec::Open begin_if(Rec& recorder, bool wanted, Values... values) {
    if (!wanted) return recorder.unrecorded();
    return recorder.template begin<kEvent>(values...);
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
    struct Open {};
    struct Args {
        using Rec = Recorder;
    };
    TK_DEVICE Recorder(Args, const Warp&, uint32_t = 0, uint32_t = 0) {}
    Recorder(const Recorder&) = delete;
    template <auto kEvent, class... Values>
    TK_DEVICE Open begin(Values...) {
        return {};
    }
    TK_DEVICE Open unrecorded() { return {}; }
    template <auto kEvent>
    TK_DEVICE void take_back_if(bool) {}
    template <auto kEvent, class... Values>
    TK_DEVICE void mark(Values...) {}
    template <auto kEvent, class... Values>
    TK_DEVICE Open next(Open, Values...) {
        return {};
    }
    TK_DEVICE void end_sequence(Open) {}
};

// An open span; closes at the end of its scope unless it was closed before.
template <class Rec, auto kEvent>
class Span {
public:
    static constexpr bool kTraced = true;
    TK_DEVICE Span(Rec& recorder, const typename Rec::Open& open) : recorder_(recorder), open_(open) {}
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
    const typename Rec::Open open_;
    bool closed_ = false;  // the compiler knows it wherever a span is closed on every way
};

// Untraced: nothing, not even a branch that the compiler would have to fold.
template <auto kEvent>
class Span<Recorder<false>, kEvent> {
public:
    static constexpr bool kTraced = false;
    TK_DEVICE Span(Recorder<false>&, Recorder<false>::Open) {}
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
    TK_DEVICE ~Sequence() { recorder_.end_sequence(open_); }

    template <auto kEvent, class... Values>
    TK_DEVICE void next(Values... values) {
        open_ = recorder_.template next<kEvent>(open_, values...);
    }

private:
    Rec& recorder_;
    typename Rec::Open open_;
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
// The same if `wanted`: for a wait at a barrier of a warp that may have nothing to do. docs/instrumenting.md says when.
#define TK_WAIT_IF(recorder, wanted, event, ...)                                                                     \
    [[maybe_unused]] ::tracekern::Span<std::remove_reference_t<decltype(recorder)>,                                  \
                                       ::tracekern::detail::EventOf<event, ::tracekern::EventClass::wait>::kChecked> \
    tk_span(                                                                                                         \
        recorder,                                                                                                    \
        TK_IF_TRACED_(recorder, ::tracekern::detail::begin_if<event>(recorder, wanted __VA_OPT__(, ) __VA_ARGS__)))
// Takes the span of that event, the last that this warp recorded, off the record again: the warp had nothing to do.
// A flight recorder keeps it.
#define TK_TAKE_BACK_IF(recorder, unwanted, event) \
    TK_IF_TRACED_(recorder, (recorder).template take_back_if<event>(unwanted))
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
