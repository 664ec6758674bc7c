// The extension module tracekern._low_latency
#include "moe/bind_cpu.hpp"
#include "moe/low_latency/bind.hpp"

PYBIND11_MODULE(_low_latency, family) {
    using namespace tracekern;  // NOLINT: the module's own file
    require_same_core();
    bind_facts<LowLatency>(family);
    bind_low_latency_facts(family);
    bind_low_latency_buffer<PipelineBackendCpu, take_cpu_backend>(family);
}
