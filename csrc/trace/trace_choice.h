// Which body of a kernel a launch runs: untraced, or with the recorder of one record format.
//
//   with_recorder(descriptor, [&](auto trace) { my_kernel<<<grid, threads>>>(args, trace); });
#pragma once

#include <stdexcept>

#include "trace/recorder.h"

namespace tracekern {

// What capture.launch() says of a launch, in one number: the address of its LaunchDescriptor, in the lowest bits the
// format of its records; 0: the launch is not recorded.
class TraceChoice {
public:
    TraceChoice(uint64_t descriptor = 0) : bits_(descriptor) {}  // NOLINT: the number is the choice
    TraceChoice(const LaunchDescriptor* descriptor, RecordFormat format)
        : bits_(reinterpret_cast<uint64_t>(descriptor) | static_cast<uint64_t>(format)) {}

    bool is_traced() const { return bits_ != 0; }
    RecordFormat format() const { return static_cast<RecordFormat>(bits_ & kFormatBits); }
    const LaunchDescriptor& descriptor() const {
        return *reinterpret_cast<const LaunchDescriptor*>(bits_ & ~kFormatBits);
    }

private:
    static constexpr uint64_t kFormatBits = 3;
    static_assert(alignof(LaunchDescriptor) > kFormatBits);

    uint64_t bits_;
};

// The formats that a capture asks for.
#ifdef TK_SAMPLE  // for tests that compile often
inline constexpr RecordFormat kCaptureFormats[] = {RecordFormat::span};
#else
inline constexpr RecordFormat kCaptureFormats[] = {RecordFormat::span, RecordFormat::ring, RecordFormat::cycles};
#endif

// Calls f.operator()<Rec>() with the recorder type of a body.
template <class F>
void with_recorder_type(bool is_traced, RecordFormat format, F f) {
    if (!is_traced) return f.template operator()<Recorder<false>>();
    if (format == RecordFormat::span) return f.template operator()<Recorder<true, RecordFormat::span>>();
#ifndef TK_SAMPLE
    if (format == RecordFormat::ring) return f.template operator()<Recorder<true, RecordFormat::ring>>();
    if (format == RecordFormat::cycles) return f.template operator()<Recorder<true, RecordFormat::cycles>>();
#endif
    throw std::invalid_argument("no capture asks for this record format");
}

// Calls f(trace), or f.operator()<Rec>(trace), with what the kernel gets: a Rec::Args of the recorder type that the
// launch asks for.
template <class F>
void with_recorder(TraceChoice launch, F f) {
    with_recorder_type(launch.is_traced(), launch.format(), [&]<class Rec>() {
        typename Rec::Args trace{};
        if constexpr (Rec::kTraced) trace.launch = launch.descriptor();
        if constexpr (requires { f(trace); }) {
            f(trace);
        } else {
            f.template operator()<Rec>(trace);
        }
    });
}

// Calls f(trace) with a Rec::Args of each recorder type that with_recorder() may choose, so that all bodies of a kernel
// can be loaded before one of them runs.
template <class F>
void for_each_recorder(F f) {
    const auto call = [&]<class Rec>() { f(typename Rec::Args{}); };
    with_recorder_type(false, RecordFormat::span, call);
    for (const RecordFormat format : kCaptureFormats) with_recorder_type(true, format, call);
}

}  // namespace tracekern
