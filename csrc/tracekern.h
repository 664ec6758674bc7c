// What a user's kernel includes: #include <tracekern.h>, with -I set to tracekern.include_path().
#pragma once

#include "platform/qualifiers.h"

#if __cplusplus < (TK_GPU ? 201703L : 202002L)
    #error "tracekern.h needs C++20, in CUDA C++17: compile with -std=c++20"
#endif
// Warnings that a project turns on are about its own code. Nested spans, for one, have one name and shadow each other.
#pragma GCC system_header

#include "trace/trace_choice.h"

// What kernels and their hosts name, for a using-directive: `using namespace tracekern` would bring the device layer
// along, with names that a project may have, too (Warp, Half, Span, kLanes).
namespace tracekern::api {
using tracekern::describe_events;
using tracekern::for_each_recorder;
using tracekern::Recorder;
using tracekern::RecordFormat;
using tracekern::TraceChoice;
using tracekern::WholeRecorder;
using tracekern::WholeRecorderOfPeers;
using tracekern::with_recorder;
}  // namespace tracekern::api
