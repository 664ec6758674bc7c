// Binds a family's facts and its pipeline on the CPU backend; its option `executor` is "fibers" or "threads".
//
// A family is an extension of its own, and takes communicators of tracekern._core. What belongs to a rank (clock, link,
// time limit, abort) is reached through its communicator; what a launch points its threads at lives in the extension
// that launches.
#pragma once

#include "apis/built_from.hpp"
#include "apis/cpu_backend.hpp"
#include "moe/bind.hpp"
#include "moe/pipeline_cpu.hpp"

namespace tracekern {

inline PipelineBackendCpu take_cpu_backend(pybind11::kwargs& options) {
    const auto executor = options.contains("executor") ? take_option<std::string>(options, "executor") : "fibers";
    return PipelineBackendCpu(cpu_executor(executor));
}

template <class Family>
void bind_cpu_family(pybind11::module_& family) {
    require_same_core();
    bind_facts<Family>(family);
    bind_pipeline<Family, PipelineCpu<Family>, take_cpu_backend>(family);
}

}  // namespace tracekern
