// Binds a family's pipeline on the CPU backend; its option `executor` is "fibers" or "threads".
#pragma once

#include "apis/cpu_backend.hpp"
#include "moe/bind.hpp"
#include "moe/pipeline_cpu.hpp"

namespace tracekern {

inline PipelineBackendCpu take_cpu_backend(pybind11::kwargs& options) {
    const auto executor = options.contains("executor") ? take_option<std::string>(options, "executor") : "fibers";
    return PipelineBackendCpu(cpu_executor(executor));
}

template <class Family, auto kTakeConfig>
auto bind_cpu_pipeline(pybind11::module_& family) {
    return bind_pipeline<Family, PipelineCpu<Family>, kTakeConfig, take_cpu_backend, CpuCommunicator>(family);
}

}  // namespace tracekern
