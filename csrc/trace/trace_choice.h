// Which body of a kernel a launch runs: untraced, or with the recorder of one record format.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "trace/recorder.h"

namespace tracekern {

// How a launch is traced: a descriptor in memory and the format of its records; none: the untraced body runs.
struct TraceChoice {
    const LaunchDescriptor* descriptor = nullptr;
    RecordFormat format = RecordFormat::wide;

    bool is_traced() const { return descriptor != nullptr; }
};

// The formats that the bundled kernels have a traced body for.
#ifdef TK_SAMPLE  // for tests that compile often
inline constexpr RecordFormat kBundledFormats[] = {RecordFormat::wide};
#else
inline constexpr RecordFormat kBundledFormats[] = {RecordFormat::wide, RecordFormat::ring};
#endif

// Calls f.operator()<Rec>() with the recorder type of a body.
template <class F>
void with_recorder_type(bool is_traced, RecordFormat format, F f) {
    if (!is_traced) return f.template operator()<Recorder<false>>();
    if (format == RecordFormat::wide) return f.template operator()<Recorder<true, RecordFormat::wide>>();
#ifndef TK_SAMPLE
    if (format == RecordFormat::ring) return f.template operator()<Recorder<true, RecordFormat::ring>>();
#endif
    throw std::invalid_argument("the bundled kernels have no body for this record format");
}

// Calls f.operator()<Rec>(args) with the recorder type that the choice asks for.
template <class F>
void with_recorder(const TraceChoice& trace, F f) {
    with_recorder_type(trace.is_traced(), trace.format, [&]<class Rec>() {
        if constexpr (std::is_same_v<Rec, Recorder<false>>) {
            f.template operator()<Rec>(typename Rec::Args{});
        } else {
            f.template operator()<Rec>(typename Rec::Args{*trace.descriptor});
        }
    });
}

}  // namespace tracekern
