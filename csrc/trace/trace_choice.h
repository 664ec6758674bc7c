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
};

// What capture.launch() says of a launch, in one number: the address of its LaunchDescriptor, in the lowest bits the
// format of its records and the level of the events that it selects, and in bit 62, which fits a signed number, whether
// it may run untraced for lack of a body; 0: the launch is not recorded.
class TraceChoice {
public:
    TraceChoice(uint64_t descriptor = 0) : bits_(descriptor) {}  // NOLINT: the number is the choice
    TraceChoice(const LaunchDescriptor* descriptor, RecordFormat format)
        : bits_(reinterpret_cast<uint64_t>(descriptor) | static_cast<uint64_t>(format)) {}

    bool is_traced() const { return bits_ != 0; }
    RecordFormat format() const { return static_cast<RecordFormat>(bits_ & kFormatBits); }
    // Of the events that are selected none has a higher one; 0: not known.
    uint32_t level() const { return static_cast<uint32_t>((bits_ & kLevelBits) >> kLevelShift); }
    // A body that lacks what was asked for is told to the capture, not thrown: of a capture with on_error="warn".
    bool only_tells() const { return (bits_ & kOnlyTells) != 0; }
    const LaunchDescriptor& descriptor() const {
        return *reinterpret_cast<const LaunchDescriptor*>(bits_ & ~(kFormatBits | kLevelBits | kOnlyTells));
    }
    // What the launch asks for.
    BodyKind body() const {
        const bool is_whole = is_traced() && format() == RecordFormat::span && WholeLaunch::is_fit(descriptor());
        return {is_traced(), format(), is_whole ? Extent::whole : Extent::any};
    }
    // The capture says so when it closes.
    void tell_of_body(uint32_t its_level) const {
        const_cast<LaunchDescriptor&>(descriptor()).replay =
            kLacksBody | static_cast<uint32_t>(format()) << kLackedFormatShift | its_level;
    }

private:
    static constexpr uint64_t kFormatBits = 3;
    static constexpr uint32_t kLevelShift = 2;
    static constexpr uint64_t kLevelBits = uint64_t{kMaxLevel} << kLevelShift;
    static constexpr uint64_t kOnlyTells = uint64_t{1} << 62;
    static_assert(alignof(LaunchDescriptor) > (kFormatBits | kLevelBits));

    uint64_t bits_;
};

#ifndef TK_FORMATS  // fewer are for tests that compile often
    #define TK_FORMATS RecordFormat::span, RecordFormat::ring, RecordFormat::cycles
    #define TK_WHOLE   TK_GPU
#endif

// The recorder of small calls, see trace/whole_recorder.h. Compiled for GPUs.
using WholeRecorder = Recorder<true, RecordFormat::span, kMaxLevel, Extent::whole>;

namespace detail {

template <class... Recs>
struct Bodies {};

template <RecordFormat... kFormats>
using BodiesOfFormats = Bodies<Recorder<true, kFormats>...>;
template <RecordFormat... kFormats>
using BodiesWithWhole = Bodies<Recorder<true, kFormats>..., WholeRecorder>;

// For kernels that last long, and for all.
using EveryFormat = BodiesOfFormats<TK_FORMATS>;
#if TK_WHOLE
using EveryBody = BodiesWithWhole<TK_FORMATS>;
#else
using EveryBody = EveryFormat;
#endif

template <class... Recs>
constexpr bool has_whole(Bodies<Recs...>) {
    return (Recs::kIsWhole || ...);
}

// What with_recorder<Recs...>() picks from.
template <class... Recs>
using BodiesOf = std::conditional_t<sizeof...(Recs) == 0, EveryBody, Bodies<Recs...>>;

template <class Rec>
constexpr Extent extent_of = Rec::kIsWhole ? Extent::whole : Extent::any;

// Of the bodies that record such a launch the one with the fewest events that has all of this level, else the one that
// has most; of two that of whole launches. -1: there is none.
template <class... Recs>
int pick_body(BodyKind kind, uint32_t level) {
    const BodyKind kinds[] = {{true, Recs::kFormat, extent_of<Recs>}...};
    const uint32_t levels[] = {Recs::kLevel...};
    const auto fits = [&](int i) {
        return kinds[i].format == kind.format && (kinds[i].extent == Extent::any || kind.extent == Extent::whole);
    };
    const auto is_better = [&](int i, int than) {
        if (levels[i] == levels[than]) return kinds[i].extent == Extent::whole;
        return levels[than] < level ? levels[i] > levels[than] : levels[i] >= level && levels[i] < levels[than];
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
uint32_t level_of_body(Bodies<Recs...>, BodyKind kind, uint32_t level) {
    const uint32_t levels[] = {0, Recs::kLevel...};
    return levels[pick_body<Recs...>(kind, level) + 1];
}

// Calls f(Rec::Args{}) with the recorder type of a body.
template <class F, class... Recs>
void with_body(Bodies<Recs...>, BodyKind kind, uint32_t level, F&& f) {
    if (!kind.is_traced) return f(Recorder<false>::Args{});
    const int picked = pick_body<Recs...>(kind, level);
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
template <class Bodies = detail::EveryBody, class F>
void with_recorder_type(BodyKind kind, F f) {
    detail::with_body(
        Bodies{}, kind, kMaxLevel, [&](auto args) { f.template operator()<typename decltype(args)::Rec>(); });
}

// Calls f(trace), or f.operator()<Rec>(trace), with what the kernel gets: a Rec::Args of the recorder type that the
// launch asks for.
template <class... Recs, class F>
void with_recorder(TraceChoice launch, F f) {
    using Bodies = detail::BodiesOf<Recs...>;
    const uint32_t level = launch.level() == 0 ? kMaxLevel : launch.level();
    if (launch.only_tells()) {
        const uint32_t found = detail::level_of_body(Bodies{}, launch.body(), level);
        if (found < level) launch.tell_of_body(found);
        if (found == 0) launch = 0;
    }
    detail::with_body(Bodies{}, launch.body(), level, [&](auto trace) {
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
inline BodyKind bundled_body(TraceChoice launch) {
    BodyKind kind = launch.body();
    if (!detail::has_whole(detail::EveryBody{})) kind.extent = Extent::any;
    return kind;
}

// Calls f(kind) for each body that a bundled kernel has.
template <class F>
void for_each_body_kind(F f) {
    f(BodyKind{});
    detail::for_each_body(detail::EveryBody{}, [&](auto args) {
        using Rec = typename decltype(args)::Rec;
        f(BodyKind{true, Rec::kFormat, detail::extent_of<Rec>});
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
