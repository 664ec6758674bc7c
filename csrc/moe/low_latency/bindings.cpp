// tracekern._C.families["low_latency"]
#include "moe/bind_cpu.hpp"
#include "moe/low_latency/bind.hpp"

namespace tracekern {

void register_low_latency(pybind11::module_& extension) {
    auto family = family_module<LowLatency>(extension);
    bind_facts<LowLatency>(family);
    bind_low_latency_facts(family);
    bind_low_latency_buffer<PipelineBackendCpu, take_cpu_backend>(family);
}

}  // namespace tracekern
