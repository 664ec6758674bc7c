// Arguments that every binding of the CPU backend takes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "comm/communicator_cpu.hpp"

namespace tracekern {

// descriptor: address of a LaunchDescriptor, 0 for an untraced launch.
inline TraceChoice trace_choice(uint64_t descriptor, const std::string& record_format) {
    TraceChoice choice;
    choice.descriptor = reinterpret_cast<const LaunchDescriptor*>(descriptor);
    if (record_format == "compact") {
        choice.format = RecordFormat::compact;
    } else if (record_format != "wide") {
        throw std::invalid_argument("record_format is '" + record_format + "'; wanted 'wide' or 'compact'");
    }
    return choice;
}

inline CpuExecutor cpu_executor(const std::string& name) {
    if (name == "fibers") return CpuExecutor::fibers;
    if (name == "threads") return CpuExecutor::threads;
    throw std::invalid_argument("executor is '" + name + "'; wanted 'fibers' or 'threads'");
}

}  // namespace tracekern
