// Names for enums, and how a launch is traced.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "trace/record.h"
#include "trace/trace_choice.h"

namespace tracekern {

template <class Enum, size_t kCount>
Enum enum_named(const std::string& what, const std::string& name, const char* const (&names)[kCount]) {
    std::string wanted;
    for (size_t i = 0; i < kCount; ++i) {
        if (name == names[i]) return static_cast<Enum>(i);
        wanted += std::string(i ? ", " : "") + names[i];
    }
    throw std::invalid_argument(what + " is '" + name + "'; wanted one of " + wanted);
}

template <size_t kCount>
pybind11::list names_list(const char* const (&names)[kCount]) {
    pybind11::list result;
    for (const char* name : names) result.append(name);
    return result;
}

// A format that the bundled kernels have a body for.
inline RecordFormat record_format_named(const std::string& name) {
    constexpr const char* kBundled[] = {kRecordFormatNames[0], kRecordFormatNames[1]};
    return enum_named<RecordFormat>("record_format", name, kBundled);
}

// descriptor: address of a LaunchDescriptor, 0 for an untraced launch.
inline TraceChoice trace_choice(uint64_t descriptor, const std::string& record_format) {
    return {reinterpret_cast<const LaunchDescriptor*>(descriptor), record_format_named(record_format)};
}

}  // namespace tracekern
