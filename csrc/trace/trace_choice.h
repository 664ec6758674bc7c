// Which body of a kernel a launch runs: untraced, or with the recorder of one record format.
//
//   with_recorder(descriptor, [&](auto trace) { my_kernel<<<grid, threads>>>(args, trace); });
//
// Each recorder is a body that is compiled. with_recorder<Recorder<true>, Recorder<true, RecordFormat::span, 1>>(...)
// has these two and the untraced one; without a list there is one for each format.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "trace/recorder.h"

namespace tracekern {

// Which body of a kernel: untraced, or with what recorder.
struct BodyKind {
    bool is_traced = false;
    RecordFormat format = RecordFormat::span;
    Extent extent = Extent::any;
    uint32_t level = kMaxLevel;  // of its events none has a higher one
};

// What capture.launch() says of a launch, in one number: the address of its LaunchDescriptor, in the lowest bits the
// format of its records and the level of the events that it selects, and in bits 61 and 62, the highest that fit a
// signed number, whether it selects all events of that level, and whether it may run untraced for lack of a body; 0:
// the launch is not recorded.
class TraceChoice {
public:
    TraceChoice(uint64_t descriptor = 0) : bits_(descriptor) {}  // NOLINT: the number is the choice
    TraceChoice(const LaunchDescriptor* descriptor, RecordFormat format)
        : bits_(reinterpret_cast<uint64_t>(descriptor) | static_cast<uint64_t>(format)) {}

    bool is_traced() const { return bits_ != 0; }
    RecordFormat format() const { return static_cast<RecordFormat>(bits_ & kFormatBits); }
    // Of the events that are selected none has a higher one.
    uint32_t level() const {
        const auto known = static_cast<uint32_t>((bits_ & kLevelBits) >> kLevelShift);
        return known == 0 ? kMaxLevel : known;
    }
    // A body that lacks what was asked for is told to the capture, not thrown: of a capture with on_error="warn".
    bool only_tells() const { return (bits_ & kOnlyTells) != 0; }
    const LaunchDescriptor& descriptor() const {
        return *reinterpret_cast<const LaunchDescriptor*>(bits_ &
                                                          ~(kFormatBits | kLevelBits | kAllOfLevel | kOnlyTells));
    }
    // What the launch asks for.
    BodyKind body() const {
        const bool is_whole =
            is_traced() && format() == RecordFormat::span && selects_all() && WholeLaunch::is_fit(descriptor());
        return {is_traced(), format(), is_whole ? Extent::whole : Extent::any, level()};
    }
    // The capture says so when it closes.
    void tell_of_body(uint32_t its_level) const {
        const_cast<LaunchDescriptor&>(descriptor()).replay =
            kLacksBody | static_cast<uint32_t>(format()) << kLackedFormatShift | its_level;
    }

private:
    // All events, or all of its level.
    bool selects_all() const { return (bits_ & kAllOfLevel) != 0 || descriptor().event_mask == ~uint64_t{0}; }

    static constexpr uint64_t kFormatBits = 3;
    static constexpr uint32_t kLevelShift = 2;
    static constexpr uint64_t kLevelBits = uint64_t{kMaxLevel} << kLevelShift;
    static constexpr uint64_t kAllOfLevel = uint64_t{1} << 61;
    static constexpr uint64_t kOnlyTells = uint64_t{1} << 62;
    static_assert(alignof(LaunchDescriptor) > (kFormatBits | kLevelBits));

    uint64_t bits_;
};

#ifndef TK_FORMATS  // fewer are for tests that compile often
    #define TK_FORMATS RecordFormat::span, RecordFormat::ring, RecordFormat::cycles
    #define TK_WHOLE   TK_GPU
#endif

// The recorder of small calls, see trace/whole_recorder.h, and that of their events of level 1. Compiled for GPUs.
using WholeRecorder = Recorder<true, RecordFormat::span, kMaxLevel, Extent::whole>;
using WholeRecorderOfPeers = Recorder<true, RecordFormat::span, 1, Extent::whole>;

namespace detail {

template <class... Recs>
struct Bodies {};

template <RecordFormat... kFormats>
using BodiesOfFormats = Bodies<Recorder<true, kFormats>...>;
template <RecordFormat... kFormats>
using BodiesWithWhole = Bodies<Recorder<true, kFormats>..., WholeRecorder>;
template <RecordFormat... kFormats>
using BodiesWithPeers = Bodies<Recorder<true, kFormats>..., WholeRecorder, WholeRecorderOfPeers>;

// For kernels that last long; for all; and for those of small calls whose events have levels.
using EveryFormat = BodiesOfFormats<TK_FORMATS>;
#if TK_WHOLE
using EveryBody = BodiesWithWhole<TK_FORMATS>;
using EveryBodyAndPeers = BodiesWithPeers<TK_FORMATS>;
#else
using EveryBody = EveryFormat;
using EveryBodyAndPeers = EveryFormat;
#endif

// What with_recorder<Recs...>() picks from.
template <class... Recs>
using BodiesOf = std::conditional_t<sizeof...(Recs) == 0, EveryBody, Bodies<Recs...>>;

template <class Rec>
constexpr Extent extent_of = Rec::kIsWhole ? Extent::whole : Extent::any;

// Of the bodies that record such a launch the one with the fewest events that has all of its level, else the one that
// has most; of two that of whole launches. -1: there is none.
template <class... Recs>
int pick_body(BodyKind kind) {
    const BodyKind kinds[] = {{true, Recs::kFormat, extent_of<Recs>}...};
    const uint32_t levels[] = {Recs::kLevel...};
    // A body of whole launches asks for no event whether it is selected.
    const auto fits = [&](int i) {
        return kinds[i].format == kind.format &&
               (kinds[i].extent == Extent::any || (kind.extent == Extent::whole && levels[i] <= kind.level));
    };
    const auto is_better = [&](int i, int than) {
        if (levels[i] == levels[than]) return kinds[i].extent == Extent::whole;
        return levels[than] < kind.level ? levels[i] > levels[than]
                                         : levels[i] >= kind.level && levels[i] < levels[than];
    };
    int best = -1;
    for (int i = 0; i < static_cast<int>(sizeof...(Recs)); ++i) {
        if (fits(i) && (best < 0 || is_better(i, best))) best = i;
    }
    return best;
}

template <class F, class... Recs>
void for_each_body(Bodies<Recs...>, F&& f) {
    (f(typename Recs::Args{}), ...);
}

// The level of the body that pick_body() takes; 0: there is none.
template <class... Recs>
uint32_t level_of_body(Bodies<Recs...>, BodyKind kind) {
    const uint32_t levels[] = {0, Recs::kLevel...};
    return levels[pick_body<Recs...>(kind) + 1];
}

// Whether pick_body() takes one of whole launches.
template <class... Recs>
bool is_whole_body(Bodies<Recs...>, BodyKind kind) {
    const bool is_whole[] = {false, Recs::kIsWhole...};
    return is_whole[pick_body<Recs...>(kind) + 1];
}

// Calls f(Rec::Args{}) with the recorder type of a body.
template <class F, class... Recs>
void with_body(Bodies<Recs...>, BodyKind kind, F&& f) {
    if (!kind.is_traced) return f(Recorder<false>::Args{});
    const int picked = pick_body<Recs...>(kind);
    if (picked < 0) {
        const std::string name = kRecordFormatNames[static_cast<uint32_t>(kind.format) % 3];
        throw std::invalid_argument("the kernel has no body for records of format " + name +
                                    "; add Recorder<true, "
                                    "tracekern::RecordFormat::" +
                                    name +
                                    "> to the list of with_recorder<...>(), or "
                                    "capture without clock=\"cycles\" and keep=\"last\"");
    }
    int index = 0;
    ((index++ == picked ? f(typename Recs::Args{}) : void()), ...);
}

}  // namespace detail

// Calls f.operator()<Rec>() with the recorder type of a body.
template <class Bodies, class F>
void with_recorder_type(BodyKind kind, F f) {
    detail::with_body(Bodies{}, kind, [&](auto args) { f.template operator()<typename decltype(args)::Rec>(); });
}

// Calls f(trace), or f.operator()<Rec>(trace), with what the kernel gets: a Rec::Args of the recorder type that the
// launch asks for.
template <class... Recs, class F>
void with_recorder(TraceChoice launch, F f) {
    using Bodies = detail::BodiesOf<Recs...>;
    if (launch.only_tells()) {
        const uint32_t found = detail::level_of_body(Bodies{}, launch.body());
        if (found < launch.level()) launch.tell_of_body(found);
        if (found == 0) launch = 0;
    }
    detail::with_body(Bodies{}, launch.body(), [&](auto trace) {
        using Args = decltype(trace);
        if constexpr (Args::Rec::kTraced) trace = Args::of(launch.descriptor());
        if constexpr (std::is_invocable_v<F&, Args>) {
            f(trace);
        } else {
            f.template operator()<typename Args::Rec>(trace);
        }
    });
}

// The body of a bundled kernel that a launch runs.
template <class Bodies>
BodyKind bundled_body(TraceChoice launch) {
    BodyKind kind = launch.body();
    if (!detail::is_whole_body(Bodies{}, kind)) kind.extent = Extent::any;
    return kind;
}

// Calls f(kind) for each body that a bundled kernel has.
template <class Bodies = detail::EveryBody, class F>
void for_each_body_kind(F f) {
    f(BodyKind{});
    detail::for_each_body(Bodies{}, [&](auto args) {
        using Rec = typename decltype(args)::Rec;
        f(BodyKind{true, Rec::kFormat, detail::extent_of<Rec>, Rec::kLevel});
    });
}

// Calls f(trace) with a Rec::Args of each recorder type that with_recorder<Recs...>() may choose, so that all bodies of
// a kernel can be loaded before one of them runs.
template <class... Recs, class F>
void for_each_recorder(F f) {
    f(Recorder<false>::Args{});
    detail::for_each_body(detail::BodiesOf<Recs...>{}, f);
}

}  // namespace tracekern
