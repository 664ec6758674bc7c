// Arguments that every binding of the CPU backend takes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "apis/names.hpp"
#include "comm/communicator_cpu.hpp"

namespace tracekern {

inline CpuExecutor cpu_executor(const std::string& name) {
    if (name == "fibers") return CpuExecutor::fibers;
    if (name == "threads") return CpuExecutor::threads;
    throw std::invalid_argument("executor is '" + name + "'; wanted 'fibers' or 'threads'");
}

}  // namespace tracekern
